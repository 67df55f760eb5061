"""The public operation: argument checks, choice of implementation, ranks, autograd, the module."""

from typing import Any

import torch
import torch.distributed as dist
from simpro_kernels import dispatch
from simpro_kernels.batch_norm_act import custom_op, reference
from simpro_kernels.checks import LOGIT_DTYPES, check_same_device, short_name
from torch import Tensor, nn

if dispatch.HAS_TRITON:
    from simpro_kernels.batch_norm_act import launch


def batch_norm_act(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    negative_slope: float = 1.0,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    process_group: dist.ProcessGroup | None = None,
    impl: str = "auto",
) -> Tensor:
    """Batch norm (Ioffe and Szegedy, 2015), then ``+ residual``, then a leaky ReLU.

    As ``leaky_relu(batch_norm(x, ...) + residual, negative_slope)`` of torch, of which forward and
    backward move 13 tensors of x's size through memory: the kernels move 8.

    Args:
        x: [N, C, ...] float32, bfloat16, float16 or (eager only) float64; best in channels_last.
        running_mean, running_var: [C]; with ``training`` they move by ``momentum`` towards the
            mean and the unbiased variance of the batch, else they normalise. None, None: the
            batch normalises, as with ``training``.
        weight, bias: [C], None for ones and zeros.
        residual: shape and dtype of x, or None.
        negative_slope: of the activation, at least 0: 0 is ReLU, 1 none.
        process_group: in training the statistics cover the batches of all its ranks, which may
            differ in N; None: of this process alone. One exchange in forward, one in backward.
        impl: "triton", "eager", "compile" (which torch.compile does around it: here as "eager"),
            or "auto" (the kernels on CUDA, else eager).

    Returns:
        Shape and dtype of x; statistics and arithmetic are float32 (float64 for float64).

    Raises:
        ValueError: an argument has the wrong shape, dtype, device or value, there is one value per
            channel to normalise by, or ``impl="triton"`` cannot run here.
    """
    _check_arguments(x, running_mean, running_var, weight, bias, residual, negative_slope)
    impl = dispatch.choose("batch_norm_act", impl, x)
    of_batch = training or running_mean is None
    numbers = (momentum, eps, negative_slope)
    if not of_batch or (process_group is None and impl != "triton" and reference.is_plain_exact(x)):
        return reference.plain(
            x, residual, weight, bias, running_mean, running_var, of_batch, *numbers
        )
    if x.numel() == x.shape[1] and (process_group is None or process_group.size() == 1):
        raise ValueError(
            "batch norm in training needs more than one value per channel over all ranks, got "
            f"{list(x.shape)}"
        )
    if weight is None:
        weight = x.new_ones(x.shape[1], dtype=torch.promote_types(x.dtype, torch.float32))
    if bias is None:
        bias = torch.zeros_like(weight)
    if impl == "triton" and process_group is None and dispatch.is_traced(x):
        added = None if residual is None else custom_op.to_matrix(residual)
        y, saved = custom_op.batch_norm_act(
            custom_op.to_matrix(x), added, weight, bias, eps, negative_slope
        )
        reference.move(running_mean, running_var, saved, momentum)
        return custom_op.to_images(y, x)
    backend = launch if impl == "triton" else reference
    tensors = (x, residual, weight, bias, running_mean, running_var)
    return custom_op.run_function(*tensors, *numbers, backend, process_group)


class BatchNormAct(nn.BatchNorm2d):
    """:func:`batch_norm_act` with the parameters, buffers and names of ``nn.BatchNorm2d``.

    ``forward(x, residual=None)`` takes [N, C, ...].

    Args:
        num_features, options: as for ``nn.BatchNorm2d``.
        negative_slope: of the activation: 0 is ReLU, 1 none.
        impl: see the function.

    Attributes:
        synchronised: statistics in training cover all ranks of ``process_group`` (None: all).
    """

    def __init__(
        self,
        num_features: int,
        *,
        negative_slope: float = 1.0,
        impl: str = "auto",
        **options: Any,
    ) -> None:
        super().__init__(num_features, **options)
        dispatch.check_impl(impl)
        self.negative_slope = negative_slope
        self.impl = impl
        self.synchronised = False
        self.process_group: dist.ProcessGroup | None = None

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        momentum = self.momentum
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if momentum is None:  # The mean of all batches; waits for the device.
                momentum = 1 / float(self.num_batches_tracked)
        group = None
        if self.training and self.synchronised:
            group = self.process_group or dist.group.WORLD
        return batch_norm_act(
            x,
            self.running_mean,
            self.running_var,
            self.weight,
            self.bias,
            residual=residual,
            negative_slope=self.negative_slope,
            training=self.training,
            momentum=momentum or 0.0,
            eps=self.eps,
            process_group=group,
            impl=self.impl,
        )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, negative_slope={self.negative_slope}, impl={self.impl!r}"


def _check_arguments(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    negative_slope: float,
) -> None:
    if x.dim() < 2:
        raise ValueError(f"batch norm takes [N, C, ...], got {list(x.shape)}")
    if x.dtype not in LOGIT_DTYPES:
        raise ValueError(
            f"x must be float32, bfloat16, float16 or float64, got {short_name(x.dtype)}"
        )
    for name, vector in (
        ("running_mean", running_mean),
        ("running_var", running_var),
        ("weight", weight),
        ("bias", bias),
    ):
        if vector is not None and vector.shape != x.shape[1:2]:
            raise ValueError(f"{name} must have shape [{x.shape[1]}], got {list(vector.shape)}")
    if (running_mean is None) != (running_var is None):
        raise ValueError("running_mean and running_var must both be tensors or both be None")
    if residual is not None:
        check_same_device("residual", residual, "x", x)
        if residual.shape != x.shape or residual.dtype != x.dtype:
            raise ValueError(
                f"residual must be {short_name(x.dtype)} {list(x.shape)} like x, got "
                f"{short_name(residual.dtype)} {list(residual.shape)}"
            )
    if not negative_slope >= 0:
        raise ValueError(f"negative_slope must be at least 0, got {negative_slope}")
