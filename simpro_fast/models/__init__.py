"""Networks, the EMA of their weights, and batch norm over ranks."""

from simpro_fast.models.batch_norm import (
    average_buffers,
    batch_norm_share,
    convert_sync_batch_norm,
    first_rank_buffers,
)
from simpro_fast.models.build import (
    build_model,
    list_models,
    needs_import,
    network_maker,
    register_model,
)
from simpro_fast.models.ema import ModelEMA
from simpro_fast.models.head import (
    BranchPool,
    HeadNetwork,
    MultiHead,
    Output,
    UnitRows,
    adopt_parameters,
    classifier_of,
    feature_size,
    freeze_backbone,
    frozen_names,
    head_of,
    head_tensors,
    plain_copy,
    start_at_zero,
)
from simpro_fast.models.hub import weights_file, weights_preprocessing
from simpro_fast.models.lora import give_lora, merged_state
from simpro_fast.models.pretrained import PretrainedReport, load_pretrained, weights_sha256

__all__ = [
    "BranchPool",
    "HeadNetwork",
    "ModelEMA",
    "MultiHead",
    "Output",
    "PretrainedReport",
    "UnitRows",
    "adopt_parameters",
    "average_buffers",
    "batch_norm_share",
    "build_model",
    "classifier_of",
    "convert_sync_batch_norm",
    "feature_size",
    "first_rank_buffers",
    "freeze_backbone",
    "frozen_names",
    "give_lora",
    "head_of",
    "head_tensors",
    "list_models",
    "load_pretrained",
    "merged_state",
    "needs_import",
    "network_maker",
    "plain_copy",
    "register_model",
    "start_at_zero",
    "weights_file",
    "weights_preprocessing",
    "weights_sha256",
]
