"""From the views of a batch to the logits that the method takes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from simpro_fast.config.schema import TrainConfig
from simpro_fast.engine.base import Engine
from simpro_fast.methods import Method


class ViewForward:
    """Sends labeled, weak and strong views through the network, in one pass or in two.

    `weak_forward=concat` is the published recipe: one pass over all rows, so that batch norm
    normalises them together and the weak rows, which carry no loss, still cost a backward pass
    through its statistics.

    `weak_forward=no_grad` runs the weak rows first, without a graph, and then the others. Each
    pass is normalised by the statistics of its own rows. The running statistics move once per
    step by the momentum of the network, towards the mean of both passes weighted by their rows,
    as one pass would move them (short of the variance between the passes' means).

    `strong_forward=confident` also leaves out the strong views that the loss will not look at:
    after the weak pass the method says which images pass its threshold, and the second pass has
    the labeled rows and the strong views of these images. The host waits once per step for their
    number, and a compiled network, whose shapes are static, is refused by the configuration.
    Weights of the running statistics are those of `strong_forward=all`.

    With several ranks every rank runs the same passes, so that the collectives of synchronised
    batch norm match; its statistics are weighted by the ranks' rows.

    Args:
        engine: runs the network.
        method: decides which images are confident.
        rows: of one call's views, labeled (L*b), weak (m) and strong (V*m), in this order.
        train: `weak_forward`, `strong_forward`.
    """

    def __init__(
        self,
        engine: Engine,
        method: Method,
        rows: list[int],
        train: TrainConfig,
    ) -> None:
        self._engine, self._method, self._rows = engine, method, rows
        self._two_passes = train.weak_forward == "no_grad"
        self._confident = train.strong_forward == "confident"
        self._weak_share = rows[1] / sum(rows)

    def __call__(self, views: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Views [L*b + (1+V)*m, C, H, W] to logits of the labeled, weak and strong rows.

        Returns:
            [L*b, K], [m, K] and [V*m, K]; with `strong_forward=confident` the strong rows of
            images that fail the threshold are zeros.
        """
        if not self._two_passes:
            labeled, weak, strong = self._engine.forward(views).split(self._rows)
            return labeled, weak, strong
        num_labeled, num_weak, num_strong = self._rows
        first_strong = num_labeled + num_weak
        with torch.no_grad(), batch_norm_share(self._engine.module, self._weak_share, first=True):
            weak = self._engine.forward(views[num_labeled:first_strong])
        if self._confident:
            chosen = self._confident_rows(weak)
            labeled_rows = torch.arange(num_labeled, device=chosen.device)
            trained = take_rows(views, torch.cat([labeled_rows, first_strong + chosen]))
        else:
            trained = torch.cat([views[:num_labeled], views[first_strong:]])
        with batch_norm_share(self._engine.module, 1 - self._weak_share, first=False):
            logits = self._engine.forward(trained)
        labeled, strong = logits[:num_labeled], logits[num_labeled:]
        if self._confident:
            strong = strong.new_zeros(num_strong, *strong.shape[1:]).index_copy(0, chosen, strong)
        return labeled, weak, strong

    def _confident_rows(self, logits_weak: Tensor) -> Tensor:
        """Strong rows to run, int64, counted from the first strong one; view-major."""
        _, images, strong = self._rows
        mask = self._method.confident(logits_weak)
        number = int(mask.sum())  # The one wait of this mode: shapes follow from it.
        # Confident images first, each group in the order of the batch.
        kept = mask.to(torch.uint8).argsort(descending=True, stable=True)[:number]
        first_of_view = torch.arange(0, strong, images, device=kept.device)
        return (first_of_view[:, None] + kept).flatten()


def take_rows(views: Tensor, rows: Tensor) -> Tensor:
    """Rows of [R, C, H, W] in channels_last, which a plain index_select would lose."""
    return views.permute(0, 2, 3, 1).index_select(0, rows).permute(0, 3, 1, 2)


@contextmanager
def batch_norm_share(model: nn.Module, share: float, *, first: bool) -> Iterator[None]:
    """Let a pass with `share` of a step's rows move the running statistics by as much.

    With momentum m, a first pass of share s and a second of 1 - s, these rates add up to
    r <- (1 - m) r + m (s a + (1 - s) b), whatever a and b the passes see.
    """
    norms = [
        (norm, norm.momentum)
        for norm in model.modules()
        if isinstance(norm, _BatchNorm) and norm.momentum is not None
    ]
    for norm, momentum in norms:
        own = momentum * share
        norm.momentum = own / (1 - momentum * (1 - share)) if first else own
    try:
        yield
    finally:
        for norm, momentum in norms:
            norm.momentum = momentum
