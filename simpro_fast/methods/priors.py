"""Class priors of the labeled and the unlabeled stream, estimated while training.

Legend: K classes, p a distribution [K], c_l and c_u the class counts of the current period.
Source: SimPro (ICML 2024), Algorithm 1; where its released code differs, see `variant`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

Variant = Literal["released", "paper"]
PRIOR_FLOOR = 1e-12
IGNORED_TARGET = -100


def log_prior(prior: Tensor, tau: float, variant: Variant) -> Tensor:
    """The logit adjustment for a class prior: tau * log p with a floor.

    Args:
        prior: float64 [K].
        tau: strength; 0 gives no adjustment (to 1e-12).
        variant: "released" floors after the power, log(p^tau + 1e-12), never below -27.6;
            "paper" floors the prior, tau * log(max(p, 1e-12)), so that its floor scales with tau.

    Returns:
        float64 [K].
    """
    if variant == "released":
        return (prior.pow(tau) + PRIOR_FLOOR).log()
    return tau * prior.clamp_min(PRIOR_FLOOR).log()


class PriorTracker(nn.Module):
    """Counts classes during a period and moves two class priors at its end.

    pi_u estimates the class distribution of the unlabeled images, phi that of all images trained
    on (labeled and kept unlabeled). At the end of a period, with m the momentum:

        pi_u <- m pi_u + (1 - m) c_u / (sum c_u + 1)             "released"
        pi_u <- m pi_u + (1 - m) c_u / sum c_u                   "paper"
        phi  <- m phi  + (1 - m) (c_l + c_u) / sum (c_l + c_u)

    The +1 makes the released pi_u sum to a little less than 1, and shrink in a period in which no
    unlabeled image was kept; "paper" leaves pi_u as it is then. A softmax does not see the
    difference. `normalised_pi_u` is what to log and compare.

    Everything is float64, also after `.half()` or `.to(dtype)`, and part of `state_dict()`. The
    counts belong to one rank each and are no buffers: DistributedDataParallel around a module that
    holds this one would copy rank 0's over the others' at every forward pass.

    Args:
        labeled_counts: images per class of the labeled set, length K. A class may have 0 images
            (its prior is floored), but not all of them.
        momentum: m in [0, 1).
        variant: see above.
        process_group: ranks whose counts are summed; None: all of them, where torch.distributed
            is initialised.
    """

    rank_counts: tuple[str, ...] = ("labeled_count", "unlabeled_mass")
    """Attributes that are each rank's own and sum up over ranks, float64; what else is in the state
    is equal on all ranks. A subclass, or an instance, appends the names of its own."""
    labeled_weight: float = 1.0
    """Weight of a labeled image in phi; an unlabeled one has 1."""

    pi_u: Tensor
    phi: Tensor
    labeled_count: Tensor
    unlabeled_mass: Tensor

    def __init__(
        self,
        labeled_counts: Sequence[int] | Tensor,
        momentum: float = 0.9,
        *,
        variant: Variant = "released",
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        counts = torch.as_tensor(labeled_counts, dtype=torch.float64).detach().cpu()
        if counts.ndim != 1 or not bool((counts >= 0).all()) or not counts.sum() > 0:
            raise ValueError(
                "labeled_counts must hold one number of images per class, none negative and not "
                f"all 0; got {counts.tolist()}"
            )
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum must be in [0, 1), got {momentum}")
        if variant not in ("released", "paper"):
            raise ValueError(f"variant must be 'released' or 'paper', got {variant!r}")
        self.momentum = momentum
        self.variant: Variant = variant
        self.process_group = process_group
        # Tensors made under inference_mode could not be changed by the first training step.
        with torch.inference_mode(False):
            counts = counts.clone()
            self.register_buffer("pi_u", torch.full_like(counts, 1 / len(counts)))
            self.register_buffer("phi", counts / counts.sum())
            self.labeled_count = torch.zeros_like(counts)
            self.unlabeled_mass = torch.zeros_like(counts)

    @property
    def num_classes(self) -> int:
        """K."""
        return self.pi_u.numel()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PriorTracker:
        # .half(), .bfloat16() and .to(dtype) come through here; buffers, also those of a method's
        # parts, follow the device only.
        own = [(module, module._buffers) for module in self.modules()]
        for module, _ in own:
            module._buffers = {}
        try:
            super()._apply(fn, recurse)
        finally:
            for module, buffers in own:
                module._buffers = buffers
        for _, buffers in own:
            for name, buffer in buffers.items():
                if buffer is not None:
                    moved = fn(buffer)
                    kept = moved.dtype == buffer.dtype
                    buffers[name] = moved if kept else buffer.to(moved.device)
        for name in self.rank_counts:
            setattr(self, name, getattr(self, name).to(self.pi_u.device))
        return self

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in self.rank_counts:
            destination[prefix + name] = getattr(self, name)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        rest = dict(state_dict)
        for name in self.rank_counts:
            own = getattr(self, name)
            saved = rest.pop(prefix + name, None)
            if saved is None:
                missing_keys.append(prefix + name)
            elif saved.shape != own.shape:
                error_msgs.append(f"{prefix + name} is {list(saved.shape)}, not {list(own.shape)}")
            else:
                with torch.no_grad():
                    own.copy_(saved)
        super()._load_from_state_dict(
            rest, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> PriorTracker:
        """A copy that counts for itself, over the same ranks (a process group has no copy)."""
        new = self.__class__.__new__(self.__class__)
        memo[id(self)] = new
        memo[id(self.process_group)] = self.process_group
        new.__dict__.update({k: copy.deepcopy(v, memo) for k, v in self.__dict__.items()})
        return new

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group is not None:
            raise TypeError(
                "a method with process_group= cannot be pickled: the group belongs to this "
                "process; save state_dict(), or build it anew where it is read"
            )
        return self.__dict__

    @torch.no_grad()
    def accumulate(self, targets: Tensor, class_mass: Tensor) -> None:
        """Count a step's labeled images and kept pseudo-labels; calls add up over a period.

        Args:
            targets: integer [B], each labeled image once; only 0..K-1 is counted.
            class_mass: float [K].
        """
        # torch.bincount would wait for the device; sums of ones in float64 are exact in any order.
        counted = ((targets >= 0) & (targets < self.num_classes)).to(self.labeled_count.dtype)
        self.labeled_count.index_add_(0, targets.clamp(0, self.num_classes - 1).long(), counted)
        self.unlabeled_mass.add_(class_mass)

    @torch.no_grad()
    def update_priors(self) -> None:
        """End a period: sum the counts over the ranks, update pi_u and phi, reset the counts.

        All ranks must call it. Afterwards pi_u and phi are equal on all of them bit for bit. A
        period without a single image (labeled or kept) changes nothing.
        """
        labeled, unlabeled, pi_u, phi = self._over_ranks()
        mass = self.prior_mass(unlabeled)
        labeled = self.labeled_weight * labeled
        seen = labeled.sum() + unlabeled.sum()
        normaliser = mass.sum() + (1.0 if self.variant == "released" else 0.0)
        keep_pi_u = (normaliser == 0) | (seen == 0) | self.pi_u_stays
        moved_pi_u = pi_u.lerp(mass / normaliser, 1 - self.momentum)
        moved_phi = phi.lerp((labeled + unlabeled) / seen, 1 - self.momentum)
        self.pi_u.copy_(torch.where(keep_pi_u, pi_u, moved_pi_u))
        self.phi.copy_(torch.where(seen == 0, phi, moved_phi))
        self.labeled_count.zero_()
        self.unlabeled_mass.zero_()

    def prior_mass(self, unlabeled: Tensor) -> Tensor:
        """Return the unnormalised target of pi_u; `unlabeled` [K] is that of all ranks."""
        return unlabeled

    @property
    def pi_u_stays(self) -> bool:
        """Whether `update_priors` leaves pi_u as it is."""
        return False

    def normalised_pi_u(self) -> Tensor:
        """pi_u scaled to sum to 1, float64 [K]."""
        return self.pi_u / self.pi_u.sum()

    def over_ranks(self, values: Tensor) -> Tensor:
        """The sum of `values` over the ranks, a new tensor; all ranks must call it."""
        total = values.clone()
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(total, group=self.process_group)
        return total

    def from_ranks(self, values: Tensor) -> Tensor:
        """`values` [n, ...] of all ranks, one after another: [world_size * n, ...]."""
        if not (dist.is_available() and dist.is_initialized()):
            return values
        parts = [torch.empty_like(values) for _ in range(dist.get_world_size(self.process_group))]
        dist.all_gather(parts, values.contiguous(), group=self.process_group)
        return torch.cat(parts)

    def _over_ranks(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Counts of all ranks and the priors to start from, in one collective of 4 K numbers."""
        if not (dist.is_available() and dist.is_initialized()):
            return self.labeled_count, self.unlabeled_mass, self.pi_u, self.phi
        # The first rank's priors ride along (the others add zeros), so that ranks that were
        # started or restored differently cannot stay apart.
        first = float(dist.get_rank(self.process_group) == 0)
        packed = torch.stack(
            [self.labeled_count, self.unlabeled_mass, self.pi_u * first, self.phi * first]
        )
        dist.all_reduce(packed, group=self.process_group)
        labeled, unlabeled, pi_u, phi = packed.unbind()
        return labeled, unlabeled, pi_u, phi
