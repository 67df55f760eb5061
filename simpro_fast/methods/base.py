"""Interface between trainer and method; docs/methods.md builds one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from simpro_kernels import adjusted_cross_entropy
from torch import Tensor, nn

from simpro_fast.config.methods import MethodConfig
from simpro_fast.methods.needs import Change, Heads, Needs, PhaseTools, Setting
from simpro_fast.methods.output import MethodOutput, PseudoLabels
from simpro_fast.methods.priors import IGNORED_TARGET, PriorTracker, Variant

Impl = Literal["auto", "triton", "eager", "compile"]


def common(config: MethodConfig, setting: Setting) -> dict[str, Any]:
    """The arguments of `Method` that every method takes from its configuration."""
    return {
        "labeled_counts": setting.labeled_counts,
        "threshold": config.threshold,
        "momentum": config.momentum,
        "alpha": setting.alpha,
        "strong_views": setting.strong_views,
        "variant": config.variant,
        "impl": config.impl,
        "process_group": setting.process_group,
    }


class Method(PriorTracker):
    """A training method: losses of a step, and what it learns about classes meanwhile.

    In the order in which the trainer calls them:

        needs      what it takes beside three blocks of logits
        build      the method itself
        forward    once a micro-batch: the losses. Compiled and captured in a CUDA graph, so neither
                   a branch on values nor a collective; what is to be summed over ranks is added to
                   `rank_counts`
        end_step   once a step, after the weights have moved
        end_period at the end of every period
        enter_phase where `phase_at` changes, after end_period
        test_head  at every evaluation and at the end

    State: buffers are saved and must be equal on all ranks; `rank_counts` are saved and summed.
    Every buffer keeps its own dtype. Priors pi_u and phi are tracked for every method, see
    `PriorTracker`; a method with an estimate of its own gives it in `normalised_pi_u`.

    Args:
        labeled_counts: images per class of the labeled set, length K.
        threshold: in probability; above 1 masks every image.
        momentum: of pi_u and phi, in [0, 1).
        alpha: weight of the labeled loss.
        strong_views: V, strong views per unlabeled image.
        variant: "released" or "paper", where they differ.
        impl: kernel implementation, "auto", "triton", "eager" or "compile".
        process_group: ranks whose class counts are summed; None: all.
    """

    Config: ClassVar[type[MethodConfig]]
    """Its keys, a subclass of `MethodConfig`."""

    bound: Tensor
    """`threshold` as float32 [] on the method's device, for comparisons and kernels."""

    def __init__(
        self,
        labeled_counts: Sequence[int] | Tensor,
        *,
        threshold: float,
        momentum: float,
        alpha: float,
        strong_views: int,
        variant: Variant,
        impl: Impl,
        process_group: dist.ProcessGroup | None,
    ) -> None:
        super().__init__(labeled_counts, momentum, variant=variant, process_group=process_group)
        if not alpha > 0:
            raise ValueError(f"alpha must be positive, got {alpha}")
        if strong_views < 1:
            raise ValueError(f"strong_views must be at least 1, got {strong_views}")
        # A tensor, so that one that changes does not make torch.compile compile again.
        with torch.inference_mode(False):  # or it could not be set anew in training
            self.register_buffer("bound", torch.tensor(threshold, dtype=torch.float32), False)
        self._threshold = float(threshold)
        self.alpha = alpha
        self.strong_views = strong_views
        self.impl: Impl = impl
        self.phase = 0
        """Value of `phase_at` for the current period; kept by the trainer."""

    @classmethod
    def needs(cls, config: Any) -> Needs:
        """Declare what it takes under this configuration (an instance of `cls.Config`)."""
        return Needs()

    @classmethod
    def build(cls, config: Any, setting: Setting) -> Method:
        """The method of a run, on the CPU."""
        return cls(config, setting)  # type: ignore[call-arg, arg-type]

    @property
    def threshold(self) -> float:
        """In probability; may be set anew at every step."""
        return self._threshold

    @threshold.setter
    def threshold(self, value: float) -> None:
        self._threshold = float(value)
        self.bound.fill_(value)

    @property
    def lower_bound(self) -> Tensor:
        """For `confident`: below the threshold by far more than rounding, so that another order of
        summation in `forward` keeps no image that is missing there."""
        return self.bound * (1 - 1e-5)

    @property
    def loss_tau(self) -> float:
        """tau of the loss CE(f + tau log phi) that the network is trained with; 0: plain logits."""
        return 0.0

    forward: Callable[..., MethodOutput]
    """Loss of one step; in training mode the step's class counts are accumulated.

    Args:
        logits_labeled: float [L*B, K], view-major (row l*B + i belongs to targets[i]).
        targets: integer [B], 0..K-1, or -100 for an image that is to be ignored.
        logits_weak: float [N, K]; no gradient flows into it.
        logits_strong: float [V*N, K], view-major.
        ...: by name, what `needs` asked for.

    Returns:
        MethodOutput; the losses are float32, or float64 for float64 logits.

    Raises:
        ValueError: shapes or types that do not fit; on a CPU also a target out of range (on a GPU,
            where looking would wait for the device, its loss is NaN and it counts for no class).
    """

    def confident(self, logits_weak: Tensor) -> Tensor:
        """bool [N]: images whose strong views `forward` will look at; see `Needs.confident`."""
        raise NotImplementedError

    def pseudo_labels(self, logits_weak: Tensor) -> PseudoLabels | None:
        """The pseudo-labels that `forward` trains on, of float [N, K], as its state is now.

        None: they need more than the plain logits of an image.
        """
        return None

    def end_step(self, step: int) -> None:
        """After step `step` (from 0) on every rank: collectives, tables, what needs no gradient.

        It is neither compiled nor captured. It must not wait for the device.
        """

    def end_period(self) -> None:
        """After every period on every rank."""
        self.update_priors()

    def phase_at(self, period: int) -> int:
        """The phase of a period (from 0), a pure function of it; phases count up from 0.

        Within a phase every step does the same, so that it can be one graph.
        """
        return 0

    def enter_phase(self, phase: int, tools: PhaseTools) -> Change | None:
        """Before the first step of a new phase, once; not again when a run resumes there."""
        return None

    def span_at(self, period: int) -> tuple[int, int] | None:
        """First period, and the one after the last, over which the learning rate runs its course;
        None: the whole run. A pure function of the period (from 0)."""
        return None

    def test_head(self, heads: Heads, network: nn.Module) -> tuple[Tensor, Tensor] | None:
        """The linear layer, weight [K, D] and bias [K], by which the trained network predicts.

        It is what evaluation and the exported model have in place of the heads, on the plain
        pooled feature; so a test rule is whatever can be folded into it. None: head 0.

        Args:
            heads: of the averaged network. network: that network itself, in evaluation mode: images
                to logits as in training.
        """
        return None

    def check_shapes(
        self,
        logits_labeled: Tensor,
        targets: Tensor,
        logits_weak: Tensor,
        logits_strong: Tensor,
        *heads: int,
    ) -> None:
        """All logits are [rows, *heads, K], and the strong rows V times the weak ones."""
        wanted = (*heads, self.num_classes)
        for name, logits in (
            ("logits_labeled", logits_labeled),
            ("logits_weak", logits_weak),
            ("logits_strong", logits_strong),
        ):
            if tuple(logits.shape[1:]) != wanted:
                raise ValueError(
                    f"{name} must be [rows, {', '.join(map(str, wanted))}] "
                    f"(K = {self.num_classes} from labeled_counts), got {list(logits.shape)}"
                )
        rows, images = len(logits_strong), len(logits_weak)
        if rows != self.strong_views * images:
            raise ValueError(
                f"logits_strong must have strong_views * N = {self.strong_views} * {images} = "
                f"{self.strong_views * images} rows, got {rows}"
            )

    def masked_cross_entropy(
        self, logits_strong: Tensor, pseudo_labels: Tensor, mask: Tensor
    ) -> Tensor:
        """Cross entropy of every strong row and head towards one-hot pseudo-labels, 0 where masked.

        Args:
            logits_strong: [V*N, K], or with heads [V*N, ..., K].
            pseudo_labels: int64, mask: bool; together [N], or with heads [N, ...].

        Returns:
            Losses of the flattened rows of `logits_strong`.
        """
        return adjusted_cross_entropy(
            logits_strong.reshape(-1, self.num_classes),
            torch.where(mask, pseudo_labels, IGNORED_TARGET).flatten(),
            None,
            reduction="none",
            impl=self.impl,
        )

    def counted(
        self,
        labeled: Tensor,
        unlabeled: Tensor,
        targets: Tensor,
        mask: Tensor,
        pseudo_labels: Tensor,
        class_mass: Tensor | None = None,
    ) -> MethodOutput:
        """The end of a `forward`: in training the step is counted for pi_u and phi.

        Args:
            labeled, unlabeled: [] losses, before alpha.
            targets: of `checked_targets`.
            mask: bool [N]. pseudo_labels: int64 [N].
            class_mass: [K]; None: of one-hot pseudo-labels, one for each kept image.
        """
        if class_mass is None:
            class_mass = torch.zeros(self.num_classes, dtype=labeled.dtype, device=mask.device)
            class_mass.index_add_(0, pseudo_labels, mask.to(labeled.dtype))
        if self.training:
            self.accumulate(targets, class_mass)
        return MethodOutput(
            loss=self.alpha * labeled + unlabeled,
            loss_labeled=labeled.detach(),
            loss_unlabeled=unlabeled.detach(),
            mask_rate=mask.sum() / max(1, mask.numel()),
            class_mass=class_mass,
            mask=mask,
            pseudo_labels=pseudo_labels,
        )

    def checked_targets(self, targets: Tensor) -> Tensor:
        """int64 [B] from any integer type."""
        if targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool:
            raise ValueError(f"targets must be integers, got {targets.dtype}")
        targets = targets.long()
        if targets.device.type == "cpu" and not torch.compiler.is_compiling():
            labels = targets.detach().numpy()  # not an operation of torch: nothing to wait for
            wrong = labels[
                (labels != IGNORED_TARGET) & ((labels < 0) | (labels >= self.num_classes))
            ]
            if wrong.size:
                raise ValueError(
                    f"targets must be 0 to {self.num_classes - 1} (K = {self.num_classes} from "
                    f"labeled_counts) or {IGNORED_TARGET} (ignored), got {wrong[0]}"
                )
        return targets

    def extra_repr(self) -> str:
        return (
            f"num_classes={self.num_classes}, threshold={self.threshold}, "
            f"momentum={self.momentum}, alpha={self.alpha}, strong_views={self.strong_views}, "
            f"variant={self.variant!r}"
        )


def prior_dtype(logits: Tensor) -> torch.dtype:
    """In which to add priors to logits: float64 to float64, else float32."""
    return torch.float64 if logits.dtype == torch.float64 else torch.float32
