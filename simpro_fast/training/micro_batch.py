"""A step in several forward passes: its batch in parts, their outputs as one."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from simpro_fast.data.batch import Batch, BatchLayout
from simpro_fast.methods import MethodOutput


def split_batch(batch: Batch, layout: BatchLayout, parts: int) -> Iterator[Batch]:
    """Micro-batches of consecutive images, each in the row order of `Batch.views`.

    Args:
        batch: of one rank.
        layout: its sizes; `parts` divides the labeled images, hence the unlabeled ones.
        parts: micro-batches; one gives the batch itself.
    """
    if parts == 1:
        yield batch
        return
    small = layout.part(parts)
    for part in range(parts):
        blocks, first = [], 0
        for count, size, views in (
            (layout.labeled, small.labeled, layout.labeled_views),
            (layout.unlabeled, small.unlabeled, 1 + layout.strong_views),
        ):
            for _ in range(views):  # view-major: each view has a block of all images
                start = first + part * size
                blocks.append(batch.views[start : start + size])
                first += count
        sizes = {"labeled": small.labeled, "unlabeled": small.unlabeled}
        images = {kind: slice(part * size, (part + 1) * size) for kind, size in sizes.items()}
        of_images = {name: t[images[kind]] for name, (kind, t) in batch.by_image().items()}
        truth = batch.truth[images["unlabeled"]]
        yield Batch(step=batch.step, views=torch.cat(blocks), truth=truth, **of_images)


def join_outputs(outputs: list[MethodOutput]) -> MethodOutput:
    """The output of the whole batch, images in its order, from those of its micro-batches.

    These are of one size, so that means over them are means over the batch. The result of several
    carries no gradient; a single one is returned as it is.
    """
    if len(outputs) == 1:
        return outputs[0]

    def mean(name: str) -> Tensor:
        return torch.stack([getattr(out, name).detach() for out in outputs]).mean(0)

    return MethodOutput(
        loss=mean("loss"),
        loss_labeled=mean("loss_labeled"),
        loss_unlabeled=mean("loss_unlabeled"),
        mask_rate=mean("mask_rate"),
        class_mass=torch.stack([out.class_mass for out in outputs]).sum(0),
        mask=torch.cat([out.mask for out in outputs]),
        pseudo_labels=torch.cat([out.pseudo_labels for out in outputs]),
    )
