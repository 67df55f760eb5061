"""Fused losses, batch norm and augmentation for pseudo-label training, in PyTorch and Triton.

Needs torch; Triton is needed for ``impl="triton"`` only. Every operation is one folder with
``op.py`` (public function, argument checks), ``reference.py`` (the eager twin) and ``README.md``
(the mathematics, the counting). Those with a kernel have besides ``custom_op.py`` (autograd),
``launch.py`` (from tensors to a launch), ``plans.py`` (what compiles a kernel, launch constants)
and ``triton_*.py`` (the kernels).
"""

from simpro_kernels.adjusted_cross_entropy.op import AdjustedCrossEntropy, adjusted_cross_entropy
from simpro_kernels.augment.op import augment_views
from simpro_kernels.batch_norm_act.op import BatchNormAct, batch_norm_act
from simpro_kernels.pseudo_label_cross_entropy.op import (
    PseudoLabelCrossEntropy,
    PseudoLabelLoss,
    pseudo_label_cross_entropy,
)

__all__ = [
    "AdjustedCrossEntropy",
    "BatchNormAct",
    "PseudoLabelCrossEntropy",
    "PseudoLabelLoss",
    "adjusted_cross_entropy",
    "augment_views",
    "batch_norm_act",
    "pseudo_label_cross_entropy",
]
