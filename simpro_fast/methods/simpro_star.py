"""SimPro*: SimPro with the nearest of three class distributions in place of its estimate."""

from __future__ import annotations

import logging
from typing import Any, ClassVar

import torch
from torch import Tensor

from simpro_fast.config.methods import SimProStarConfig
from simpro_fast.methods.anchors import NAMES, anchors, labeled_prior, symmetric_kl
from simpro_fast.methods.needs import PhaseTools
from simpro_fast.methods.simpro import SimPro
from simpro_fast.utils.logs import FOUND_BY_ALL

logger = logging.getLogger(__name__)


class SimProStar(SimPro):
    """SimPro* (SimPro, ICML 2024, tables 1 and 2): a few periods of SimPro, then a fixed pi_u.

    After `anchor_after` periods pi_u becomes that of three anchors which is nearest: the labeled
    distribution, the uniform or the reversed one; it stays so to the end, while phi goes on. The
    paper names neither the distance nor what becomes of phi, and no code was published: here it is
    the symmetrised KL divergence, which the code of ACR takes for the same three anchors, and phi
    is what the network is trained on in either case. Compared is the moving average without the
    uniform distribution that it started from: with momentum 0.9 the average after five periods is
    nearest to the uniform anchor whatever the images are (estimates that are right from the first
    period on, CIFAR-10-LT of ratio 100: 0.107 to uniform, 0.314 to the true one). Published numbers
    are of the consistent, uniform and reversed distributions only; on others the nearest anchor is
    still a wrong one.

    Variants are those of SimPro. The state is SimPro's; all of it is equal on all ranks.

    Args:
        anchor_after: periods of SimPro before. In a loop of one's own call `choose_anchor` after
            so many calls of `update_priors`.
        others: as in `SimPro`.
    """

    Config: ClassVar[type[SimProStarConfig]] = SimProStarConfig
    anchors: Tensor

    def __init__(self, labeled_counts: Any, *args: Any, anchor_after: int = 5, **kwargs: Any):
        super().__init__(labeled_counts, *args, **kwargs)
        if anchor_after < 0:
            raise ValueError(f"anchor_after must not be negative, got {anchor_after}")
        self.anchor_after = anchor_after
        with torch.inference_mode(False):
            prior = labeled_prior(labeled_counts)
            self.register_buffer("anchors", anchors(prior), persistent=False)

    def phase_at(self, period: int) -> int:
        """0 while pi_u is estimated, or where it is given, then 1."""
        return int(period >= self.anchor_after and not self.given)

    def enter_phase(self, phase: int, tools: PhaseTools) -> None:
        chosen = self.choose_anchor()
        logger.info("pi_u from here on: the %s distribution", chosen, extra=FOUND_BY_ALL)

    @torch.no_grad()
    def choose_anchor(self) -> str:
        """Make the nearest anchor pi_u for good, and say which one it is."""
        start = self.momentum**self.anchor_after / self.num_classes
        seen = (self.pi_u - start).clamp_min(0)
        # Nothing seen, by rounding: the uniform start is all there is.
        estimate = seen / seen.sum() if seen.sum() > 1e-9 else self.normalised_pi_u()
        nearest = int(symmetric_kl(estimate, self.anchors).argmin())
        self.pi_u.copy_(self.anchors[nearest])
        self.phase = 1
        return NAMES[nearest]

    @property
    def pi_u_stays(self) -> bool:
        return self.given or bool(self.phase)
