"""Averages gradients over ranks while backward still computes.

Not by torch's DistributedDataParallel, which lays its buckets anew after the first backward and so
adds up in another order from then on: with three ranks or more, a resumed run would differ from an
unbroken one. (`find_unused_parameters=True` keeps them, at the price of a walk through the graph in
every step and of a warning where every parameter is used.)
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

BUCKET_ELEMENTS = 8_000_000
"""A bucket takes weights until it has this many elements. Small messages are bound by latency,
so a Wide ResNet-28-2 (1.5 M) is one; the ResNet-50s (24 to 26 M) are three, of 30 to 40 MB, of
which the first two travel during backward."""


class GradientAverage:
    """Sums each bucket of gradients over the ranks as soon as backward has filled it.

    Buckets hold parameters from the last to the first, about the order in which backward reaches
    them, and are sent in this order on every rank: collectives match whatever the ranks' timing.
    A parameter without gradient counts as zeros and stays without.

    Args:
        parameters: in the order of the network; frozen ones are left out.
        world_size: ranks, all of the default process group.
        bucket_elements: a bucket takes parameters until it holds this many elements.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        world_size: int,
        bucket_elements: int = BUCKET_ELEMENTS,
    ) -> None:
        self._world_size = world_size
        self._buckets = _fill_buckets(parameters, bucket_elements)
        self._active = False
        self._missing = [0] * len(self._buckets)
        self._sent: list[tuple[Tensor, dist.Work]] = []
        for number, bucket in enumerate(self._buckets):
            for parameter in bucket:
                parameter.register_post_accumulate_grad_hook(
                    lambda _, number=number: self._arrived(number)
                )

    def begin(self) -> None:
        """Call before the last backward of a step; gradients of earlier ones only add up."""
        self._active = True
        self._missing = [len(bucket) for bucket in self._buckets]

    def finish(self) -> None:
        """Wait, and replace this rank's gradients by the means over ranks."""
        while len(self._sent) < len(self._buckets):
            self._send()
        for bucket, (flat, work) in zip(self._buckets, self._sent, strict=True):
            work.wait()
            flat /= self._world_size
            parts = flat.split([p.numel() for p in bucket])
            pairs = [(p.grad, part) for p, part in zip(bucket, parts, strict=True)]
            found = [(grad, part.view_as(grad)) for grad, part in pairs if grad is not None]
            if found:
                torch._foreach_copy_([grad for grad, _ in found], [part for _, part in found])
        self._sent.clear()
        self._active = False

    def _arrived(self, number: int) -> None:
        if not self._active:
            return
        self._missing[number] -= 1
        while len(self._sent) < len(self._buckets) and self._missing[len(self._sent)] == 0:
            self._send()

    @torch.no_grad()
    def _send(self) -> None:
        bucket = self._buckets[len(self._sent)]
        flat = torch.cat(
            [(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in bucket]
        )
        work = dist.all_reduce(flat, async_op=True)
        assert work is not None
        self._sent.append((flat, work))


def clip_gradients(model: nn.Module, largest_norm: float | None) -> None:
    """Scale all gradients together so that their norm is at most `largest_norm`; None: leave them.

    Call it with averaged gradients, so that every rank scales by the same factor.
    """
    if largest_norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), largest_norm, foreach=True)


def _fill_buckets(parameters: Iterable[nn.Parameter], elements: int) -> list[list[nn.Parameter]]:
    buckets: list[list[nn.Parameter]] = []
    room = 0
    for parameter in reversed([p for p in parameters if p.requires_grad]):
        if room <= 0:
            buckets.append([])
            room = elements
        buckets[-1].append(parameter)
        room -= parameter.numel()
    return buckets
