"""The configuration: one frozen, strict pydantic model per section.

Every key has one owner and one meaning; what can be derived (per-rank batches, the DeepSpeed
dict, views per method) is derived here and never written twice.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, SerializeAsAny, create_model, model_validator

from simpro_fast.config.data import DataConfig
from simpro_fast.config.methods import (
    DEFAULT,
    METHODS,
    MethodConfig,
    SimProConfig,
    UnknownMethodConfig,
    method_entry,
)
from simpro_fast.config.section import LENGTH, NOTHING, ROUNDING, FilePath, Section


class ModelConfig(Section):
    """The network."""

    name: str = "wrn_28_2"
    """small_cnn, wrn_<depth>_<width>, resnet50, resnet50_3x3, timm/<name>, or your own:
    package.module.function (docs/own_code.md)."""
    weights: FilePath | None = Field(None, **NOTHING)
    """File to start from: safetensors or a torch state dict, or hf-hub:ORG/NAME in the local cache
    of the Hugging Face hub; a head of another shape is left out. A run that goes on from a
    checkpoint does not need it; if it is there it must be the same."""
    head: Literal["linear", "cosine", "mlp"] = "linear"
    """What gives the logits: one linear layer; 25 times the cosine of the features and each class's
    weights; or one hidden layer as wide as the features, with GELU, before the linear one."""
    lora_rank: int = Field(0, ge=0, le=1024)
    """Above 0: of the backbone only matrices of this rank learn, added to the weights of attention
    and MLP of timm's transformers (LoRA), at the rate of the head; the rest is frozen as with
    optim.backbone_lr_scale=0. They are merged into the exported network."""
    download: bool = Field(False, **NOTHING)
    """Fetch hf-hub:ORG/NAME where the local cache has not got it."""
    activation: Literal["leaky_relu", "relu", "silu"] | None = None
    """None: the net's own, as published: leaky_relu (0.1) in Wide ResNets, relu in ResNet-50s."""
    norm_impl: Literal["auto", "eager", "triton"] = Field("auto", **ROUNDING)
    """Batch norm with activation as one Triton kernel each way, or as its eager reference; auto:
    the kernel on CUDA. timm's networks keep their own."""
    bn_momentum: float | None = Field(None, gt=0, le=1)
    """Batch-norm momentum, the weight of the new batch as in PyTorch; None: the net's own."""
    skip_quirk: bool = True
    """Wide ResNet: keep the published nets' unused pre-activation where a stage changes width."""


class OptimConfig(Section):
    """Optimizer and learning rate; the rate is a pure function of the step."""

    name: Literal["sgd", "adamw"] = "sgd"
    """Optimizer."""
    lr: float = Field(0.03, gt=0, le=1e6)
    """Learning rate of the head, and of the backbone times `backbone_lr_scale`, at its highest."""
    backbone_lr_scale: float = Field(1.0, ge=0, le=1000)
    """All weights but the head's learn at lr times this. 0 freezes them, batch norm's running
    statistics included."""
    layer_decay: float = Field(1.0, gt=0, le=1)
    """Below 1: each layer of a timm network learns at this times the rate of the one above it, the
    highest at lr * backbone_lr_scale * this."""
    momentum: float = Field(0.9, ge=0, lt=1)
    """SGD momentum; beta1 of AdamW."""
    nesterov: bool = True
    """Nesterov momentum of SGD."""
    weight_decay: float = Field(5e-4, ge=0)
    """Not applied to biases and normalisation layers."""
    decay_shortcut_norm: bool = False
    """Decay the norm weight in the projection shortcuts of a ResNet, as the released code does."""
    schedule: Literal["cosine_7_16", "cosine", "constant"] = "cosine_7_16"
    """cosine_7_16: lr * cos(7 pi i / 16 T), which ends at 0.195 lr."""
    warmup_steps: int = Field(0, ge=0)
    """Steps over which the rate rises linearly from 0 first."""
    grad_clip: float | None = Field(None, gt=0)
    """Largest global gradient norm."""


class TrainConfig(Section):
    """Length, EMA, precision."""

    steps: int = Field(43_000, gt=0, le=10**9, **LENGTH)
    """Steps of the run."""
    period: int = Field(500, gt=0)
    """Steps between two updates of pi_u and phi (the papers' "epoch"; not a pass over the data)."""
    ema_decay: float = Field(0.999, ge=0, lt=1)
    """Decay of the averaged weights per step; they are what is evaluated and exported."""
    ema_warmup: bool = False
    """Decay min(ema_decay, (1 + step) / (10 + step)); short runs need it."""
    precision: Literal["fp32", "bf16", "fp64"] = "fp32"
    """bf16: autocast of the forward pass; weights, buffers, EMA and loss stay float32. fp64: all of
    these in float64, to check numerics (slow on GPUs; not with ZeRO 1 and 2)."""
    compile: Literal["none", "default", "max-autotune", "cuda-graphs"] = Field("none", **ROUNDING)
    """torch.compile of network and losses over static shapes; `max-autotune` tries more kernels,
    `cuda-graphs` compiles as `default` and replays the whole step, optimizer and EMA included, as
    one CUDA graph; that needs one GPU, distributed.engine=plain and one micro-batch, and otherwise
    is `default`, with a line that says why."""
    cudnn_benchmark: bool = Field(True, **ROUNDING)
    """On CUDA: time cuDNN's convolution algorithms at the first step of each shape and keep the
    fastest, where shapes are few (not with strong_forward=confident and compile=none). Another one
    rounds differently, so repeated runs may part; false lets cuDNN's heuristics choose."""
    tf32: bool = Field(True, **ROUNDING)
    """On CUDA with precision=fp32: convolutions and products with TF32's 10-bit mantissa."""
    features: FilePath | None = Field(None, **NOTHING)
    """Folder of `simpro-fast embed` with the same data and model: only the head is trained, on
    cached features of a frozen backbone. What they are of is compared. auto: made at the first
    start, in `data.cache_dir` or beside the runs, for all runs with the same images and network."""
    weak_forward: Literal["concat", "no_grad"] = "concat"
    """`concat`: one pass over all views, as published; `no_grad`: the weak views first and without
    a backward pass, which changes what batch norm sees (docs/performance.md)."""
    strong_forward: Literal["all", "confident"] = "all"
    """`confident`: only the strong views of images that pass the threshold, with `compile` in
    sevenths of the batch (needs weak_forward=no_grad; docs/performance.md)."""
    threads: int | None = Field(None, gt=0, le=1024, **ROUNDING)
    """CPU threads of torch per rank; None: the cores divided by the local ranks."""
    data_threads: int | None = Field(None, gt=0, le=1024, **NOTHING)
    """CPU threads of the data pipeline per rank; None: as `threads`."""
    profile: bool = Field(False, **NOTHING)
    """Write a torch profiler trace of a few steps into the run directory."""

    @model_validator(mode="after")
    def _check_forward(self) -> TrainConfig:
        if self.strong_forward == "confident" and self.weak_forward != "no_grad":
            raise ValueError(
                "strong_forward=confident needs the weak views' logits before the strong views "
                "run; set weak_forward=no_grad"
            )
        if self.strong_forward == "confident" and self.features is not None:
            raise ValueError("strong_forward=confident saves nothing with features; leave it out")
        return self


class EvaluateConfig(Section):
    """Test of the EMA weights."""

    every: int = Field(1, gt=0, **NOTHING)
    """In periods; the last step is always evaluated."""
    batch_size: int = Field(512, gt=0, **NOTHING)
    """Images per forward pass."""
    shares_images: int = Field(20_000, ge=0, **NOTHING)
    """Most unlabeled images that the estimate of their class shares at the end of a run looks at,
    where there is a test set and at most 200 classes; 0: no estimate."""


class DistributedConfig(Section):
    """Ranks and the engine behind the step."""

    engine: Literal["deepspeed", "plain"] = Field("deepspeed", **ROUNDING)
    """DeepSpeed, or PyTorch alone; they train the same network."""
    zero_stage: int = Field(0, ge=0, le=2, **ROUNDING)
    """DeepSpeed's ZeRO: 0 none, 1 shards the optimizer state, 2 gradients as well. They train the
    same network; 0 is the fastest for models of this size."""
    micro_batch: int | None = Field(None, gt=0)
    """Labeled images per rank and forward pass (and `mu` times as many unlabeled ones); the
    gradients of all of them make one step. Must divide the rank's share; None: all of it. Batch
    norm sees micro-batches: its statistics are theirs, its running ones move once for each."""
    sync_bn: bool | Literal["average_buffers"] = True
    """Batch norm with several ranks. true: statistics over all ranks, the same training whatever
    their number. average_buffers: each rank normalises by its own images; the running statistics
    are averaged over ranks after every step. false: as in plain DDP, each rank normalises by its
    own images and all take over rank 0's running statistics."""
    expect_world_size: int | None = Field(None, gt=0, **NOTHING)
    """Refuse to start with another number of ranks."""
    collective_timeout: float = Field(1800, gt=0, le=1e6, **NOTHING)
    """Seconds that a rank waits for the others in one collective, whatever they do meanwhile; then
    all end."""
    start_timeout: float = Field(300.0, gt=0, **NOTHING)
    """Seconds until the others stop where a rank has not come."""


class CheckpointConfig(Section):
    """Checkpoints, and the one from which a run resumes."""

    every: int = Field(1000, gt=0, **NOTHING)
    """In steps; the last step is always saved."""
    keep: int = Field(2, gt=1, **NOTHING)
    """Newest checkpoints kept; at least 2, since the newest may be damaged."""
    on_error: Literal["stop", "continue"] = Field("stop", **NOTHING)
    """When the disk refuses a checkpoint or a row of metrics: stop, or warn, train on and try again
    at the next turn."""
    resume: str = Field("auto", **NOTHING)
    """`auto`, `none`, or the path of a checkpoint file or folder."""


class LogConfig(Section):
    """Output besides metrics.jsonl: progress, loggers, figures."""

    progress: Literal["auto", "on", "off"] = Field("auto", **NOTHING)
    """A live line on a terminal; `auto`: where the output is one."""
    tensorboard: bool = Field(True, **NOTHING)
    """Write the metrics for TensorBoard too."""
    wandb: bool | str = Field(False, **NOTHING)
    """Weights & Biases: a project name, or true for `simpro_fast`. Login and mode as usual there:
    WANDB_API_KEY, WANDB_MODE=offline."""
    figures: bool = Field(True, **NOTHING)
    """Draw figures and the page `report/report.html` at the end."""


class Config(Section):
    """A whole experiment."""

    name: str = Field(pattern=r"^[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*$", **NOTHING)
    """Of the experiment; the run lies in <output_dir>/<name>/seed<seed>."""
    seed: int = Field(1, ge=0, lt=2**63)
    """Of initial weights and draws; which images are labeled is `data.split_seed`'s."""
    device: Literal["auto", "cpu", "cuda"] = Field("auto", **ROUNDING)
    """auto: a GPU where there is one."""
    output_dir: FilePath = Field(Path("runs"), **NOTHING)
    """Folder of all runs."""
    method: SerializeAsAny[MethodConfig] = SimProConfig()
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    optim: OptimConfig = OptimConfig()
    train: TrainConfig = TrainConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    distributed: DistributedConfig = DistributedConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()

    @model_validator(mode="after")
    def _check(self) -> Config:
        if self.distributed.zero_stage and self.distributed.engine == "plain":
            raise ValueError(
                "distributed.zero_stage needs distributed.engine=deepspeed; "
                "use zero_stage=0 with the plain engine"
            )
        if self.train.precision == "fp64":
            if self.distributed.zero_stage:
                raise ValueError(
                    f"train.precision=fp64 needs distributed.zero_stage=0: DeepSpeed keeps "
                    f"float32 copies of the weights at stage {self.distributed.zero_stage}"
                )
            if self.method.impl == "triton":
                raise ValueError(
                    "train.precision=fp64 needs method.impl=auto, eager or compile: "
                    "the Triton kernels compute in float32"
                )
        if self.train.features is not None and self.model.lora_rank:
            raise ValueError(
                f"model.lora_rank={self.model.lora_rank} changes what the backbone gives, and "
                "train.features caches that of a frozen one; leave one of them out"
            )
        if self.optim.layer_decay != 1 and (self.freezes_backbone or self.train.features):
            raise ValueError(
                f"optim.layer_decay={self.optim.layer_decay:g} is for a backbone that learns, and "
                "model.lora_rank, train.features and optim.backbone_lr_scale=0 freeze it; leave "
                "one of them out"
            )
        if any(not part.strip(".") for part in self.name.split("/")):
            raise ValueError(f"name={self.name!r} must not hold '.' or '..' between slashes")
        if self.optim.warmup_steps >= self.train.steps:
            raise ValueError(
                f"optim.warmup_steps={self.optim.warmup_steps} must be smaller than "
                f"train.steps={self.train.steps}"
            )
        if self.train.period > self.train.steps:
            raise ValueError(
                f"train.period={self.train.period} is longer than train.steps={self.train.steps}, "
                "so pi_u and phi would never be updated; shorten the period"
            )
        return self

    @property
    def labeled_views(self) -> int:
        """Views per labeled image (L)."""
        return self.data.labeled_views or self.method.views[0]

    @property
    def strong_views(self) -> int:
        """Strong views per unlabeled image (V)."""
        return self.data.strong_views or self.method.views[1]

    @property
    def freezes_backbone(self) -> bool:
        """Whether the backbone within the network keeps its weights; see `freeze_backbone`."""
        return self.model.lora_rank > 0 or self.optim.backbone_lr_scale == 0

    def micro_batches(self, world_size: int) -> int:
        """Forward passes per step on each of `world_size` ranks."""
        labeled = self.data.batch_size // world_size
        return labeled // (self.distributed.micro_batch or labeled)

    @property
    def run_dir(self) -> Path:
        return self.output_dir / self.name / f"seed{self.seed}"


def config_class(method: Any, *, may_import: bool = True) -> type[Config]:
    """`Config` whose method section has the keys of the method that `method` (plain data) names.

    Args:
        may_import: False: a method that is not known yet is not looked for, and may have any keys.

    Raises:
        ConfigError: there is no such method.
    """
    name = method.get("name", DEFAULT) if isinstance(method, dict) else DEFAULT
    name = name if isinstance(name, str) else DEFAULT
    known = may_import or name in METHODS
    return _config_class(method_entry(name).keys if known else UnknownMethodConfig)


@functools.cache
def _config_class(keys: type[MethodConfig]) -> type[Config]:
    # Made, not nested: so errors have the place of the key, and other methods' keys are unknown.
    return create_model("Config", __base__=Config, method=(keys, Field(default_factory=keys)))
