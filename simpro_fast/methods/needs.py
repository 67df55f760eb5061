"""Types between a method and the trainer: what the one asks for, and what it is given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch.distributed as dist
from torch import Tensor, nn

View = Literal["labeled", "weak", "strong"]
Kind = Literal["labeled", "unlabeled"]


@dataclass(frozen=True)
class Needs:
    """Beside labeled, weak and strong logits; each item becomes an argument of `forward`.

    b labeled and m unlabeled images of this rank's (micro-)batch, L and V views, K classes,
    D features. Arguments exist only where they are asked for.
    """

    heads: int = 1
    """H linear heads on the features, one matrix product for all. With more than one, all logits
    are [rows, H, K]; with one [rows, K]."""
    branches: int = 0
    """B batch norms side by side on the last feature map, each pooled, with every head on each of
    them: logits are [rows, B * H, K], branch-major, and features [rows, B, D]. 0: none."""
    features: tuple[View, ...] = ()
    """`features_labeled`, `features_weak`, `features_strong`: what the heads see, [rows, D], with
    gradient where the logits have one."""
    teacher: tuple[View, ...] = ()
    """`teacher_labeled`, ...: the same of the averaged network in evaluation mode, no gradient.
    One more forward pass of these rows."""
    constant_images: tuple[float, ...] = ()
    """`logits_constant`, [n, K] (or [n, H, K]): of images that are this value in every normalised
    pixel, by the network in training mode, one by one; no gradient, and running statistics of
    batch norm stay."""
    positions: tuple[Kind, ...] = ()
    """`labeled_positions` int64 [b] in `Split.labeled`, `unlabeled_positions` int64 [m] in
    `Split.unlabeled`."""
    uniforms: int = 0
    """`uniform_labeled` [b, n] and `uniform_unlabeled` [m, n]: float32 in [0, 1), functions of
    seed, step and place in the global batch, so that runs resume exactly and on any number of
    ranks. The only randomness that a method may use."""
    head: bool = False
    """`head`: the linear layer itself, for features that the method makes ([..., D] to logits as
    above, `head.logits(features)`)."""
    confident: bool = False
    """Whether `strong_forward=confident` works: `confident(logits_weak)` names the images whose
    strong views the loss looks at, and nothing else of the strong views is used."""


@dataclass(frozen=True)
class Setting:
    """Values from which a method is built, besides its own keys."""

    labeled_counts: tuple[int, ...]
    """Labeled images per class, length K."""
    num_unlabeled: int
    """M, length of `Split.unlabeled`."""
    strong_views: int
    """V."""
    labeled_views: int
    """L."""
    alpha: float
    """Weight of the labeled loss, resolved."""
    features: int
    """D."""
    batch_size: int
    """Labeled images of a step over all ranks."""
    mu: int
    """Unlabeled images per labeled one."""
    period: int
    """Steps of a period."""
    periods: int
    """Whole periods of the run."""
    image_size: int = 0
    """Side in pixels."""
    prior: tuple[float, ...] | None = None
    """Shares of the unlabeled classes that are given, length K; None: none are."""
    process_group: dist.ProcessGroup | None = None
    """Ranks whose counts are summed; None: all."""

    @property
    def num_classes(self) -> int:
        """K."""
        return len(self.labeled_counts)


@dataclass(frozen=True)
class Heads:
    """The linear layer of a trained network, seen as its heads.

    In evaluation branch j multiplies the pooled feature z [D] by `scale[j]` and adds `shift[j]`;
    logits of head h on it are weight[h] @ (scale[j] * z + shift[j]) + bias[h].
    """

    weight: Tensor
    """[H, K, D]."""
    bias: Tensor
    """[H, K]."""
    scale: Tensor
    """[max(B, 1), D], ones without branches."""
    shift: Tensor
    """[max(B, 1), D], zeros without branches."""

    def plain(self, head: int, branches: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """Weight [K, D] and bias [K] of one linear layer: the mean of a head over branches."""
        scale, shift = self.scale[branches].mean(0), self.shift[branches].mean(0)
        return self.weight[head] * scale, self.bias[head] + self.weight[head] @ shift


class PhaseTools(Protocol):
    """Tools of a method between two phases; every rank asks for the same."""

    network: nn.Module
    """The averaged network, in evaluation mode."""

    def logits(self, kind: Kind) -> Tensor:
        """Logits [n, K] by the method's test rule of all images of a list of the split, in its
        order and not augmented: float32 on the CPU, equal on all ranks."""
        ...

    def features(self, kind: Kind) -> Tensor:
        """Their features [n, D] likewise."""
        ...

    def labels(self) -> Tensor:
        """int64 [N] of the labeled images, pseudo-labeled ones last."""
        ...


@dataclass(frozen=True)
class Change:
    """What a new phase asks the trainer to do."""

    fresh_network: bool = False
    """Start again from new weights, optimizer state and average; the learning rate starts anew."""
    pseudo_labeled: tuple[Tensor, Tensor] | None = None
    """int64 [P] positions in `Split.unlabeled` and int64 [P] labels: these images join the labeled
    ones from here on (in place of those that joined before)."""
