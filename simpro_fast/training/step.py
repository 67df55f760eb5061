"""One step of training: Algorithm 1 of the SimPro paper, and what it works on.

`Step.step` is the whole of it. What makes it faster stands around it: torch.compile inside the
network and the method (engine/compile), a CUDA graph of the whole step (training/step_graph),
DeepSpeed behind `Engine`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from simpro_fast.config.schema import TrainConfig
from simpro_fast.data.batch import Batch, sent
from simpro_fast.data.features import FeatureDataset
from simpro_fast.data.sampling.draws import uniforms
from simpro_fast.methods import Heads, Method, MethodOutput
from simpro_fast.models import (
    ModelEMA,
    MultiHead,
    PretrainedReport,
    UnitRows,
    average_buffers,
    batch_norm_share,
    first_rank_buffers,
    frozen_names,
    head_of,
    head_tensors,
    merged_state,
    plain_copy,
)
from simpro_fast.training.engine.base import Engine, NetworkOutput, logits_and_features, views_dtype
from simpro_fast.training.features import FeatureExtractor, pretrained_network
from simpro_fast.training.setup import Setup, build_engine, build_run_method, build_student

VIEWS = ("labeled", "weak", "strong")
PARTS = 7
"""Shapes of `strong_forward=confident` under `train.compile`: with that of the weak pass eight, the
number that torch.compile keeps."""


class Step:
    """Student, optimizer, average and method of a run, and the step that moves them.

    Args:
        setup: the experiment.
        fresh: see `build_student`.

    Attributes:
        engine: forward, backward and optimizer step of the student.
        method: pseudo-labels, losses and priors.
        average: of the student's weights; what is evaluated and exported.
        pretrained: what `model.weights` filled; None: nothing.
        frozen: names of the weights and buffers that stay as `model.weights` has them, so that
            checkpoints hold the digest of that file in their place.
    """

    def __init__(self, setup: Setup, *, fresh: bool) -> None:
        config = setup.config
        self.setup, self._needs = setup, setup.needs
        student, self.pretrained = build_student(setup, fresh=fresh)
        self.method: Method = build_run_method(setup, student)
        self.average = ModelEMA(student, config.train.ema_decay, warmup=config.train.ema_warmup)
        self.engine: Engine = build_engine(config, student, setup.ranks)
        self.frozen = _in_weights_file(student, self.pretrained)
        self._rows = setup.layout.part(setup.micro_batches).rows_by_kind
        # Batch norms that each rank keeps for itself would diverge; synchronised ones are equal.
        share = {"average_buffers": average_buffers, False: first_rank_buffers}
        self._share_buffers = share.get(config.distributed.sync_bn)
        own_rule = type(self.method).test_head is not Method.test_head
        several = isinstance(head_of(student), MultiHead | UnitRows)
        plain = not (own_rule or several or config.model.lora_rank)
        self._plain = None if plain else plain_copy(self.average.module)
        side, device = setup.dataset.image_size, setup.ranks.device
        image = torch.ones(1, 3, side, side, dtype=views_dtype(config), device=device)
        image = image.contiguous(memory_format=torch.channels_last)
        self._constant_images = [image * value for value in self._needs.constant_images]
        self._backbone: nn.Module | None = None
        if self._constant_images and isinstance(setup.dataset, FeatureDataset):
            backbone = pretrained_network(config, setup.dataset).to(device)
            self._backbone = FeatureExtractor(backbone, bf16=config.train.precision == "bf16")
            self._constant_images = [self._backbone(i.float()) for i in self._constant_images]

    @property
    def student(self) -> nn.Module:
        """The network that learns, not wrapped."""
        return self.engine.module

    def step(
        self,
        batch: Batch,
        lr: float | Tensor,
        decay: float | Tensor,
        watch: Callable[[Tensor], None] | None = None,
        begun: tuple[WeakPass, Tensor | None] | None = None,
    ) -> MethodOutput:
        """One iteration of Algorithm 1 on this rank's share of the global batch.

        Args:
            batch: views and labels of the step.
            lr: learning rate of this step. decay: of the average; both numbers, or [].
            watch: gets the loss [] before the weights move, to stop a step that went wrong.
            begun: `weak_pass` of this batch and the images whose strong views run, where both are
                known already.

        Returns:
            losses, pseudo-labels and class mass of the whole batch.
        """
        outputs: list[MethodOutput] = []
        micro_batches = self.setup.micro_batches
        for micro in batch.micro_batches(self.setup.layout, micro_batches):
            # The averaged network's features, and logits of constant images, where a method asks.
            given = self._teacher_features(micro.views) | self._constant_logits()
            # f(x), f(weak), f(strong): in one pass or in two, which batch norm notices.
            weak = begun[0] if begun else self.weak_pass(micro)
            images = begun[1] if begun else (weak.images() if weak else None)
            passes = forward_views(self.engine, self._rows, micro.views, weak, images)
            for view, (logits, features) in zip(VIEWS, passes, strict=True):
                given[f"logits_{view}"] = logits
                if view in self._needs.features:
                    given[f"features_{view}"] = features
            # E step: q = softmax(f(weak) + tau log pi_u), kept where max q >= threshold. Losses:
            # alpha CE(f(x) + tau log phi, y) + CE(f(strong) + tau log phi, q). The kept class mass
            # is counted for the update of the priors, `end_period`.
            out = self.method(targets=micro.targets, **given, **self._by_image(micro))
            outputs.append(out)
            if len(outputs) == micro_batches and watch is not None:
                watch(MethodOutput.joined(outputs).loss)
            self.engine.backward(out.loss)
        self.engine.step(lr)
        if self._share_buffers is not None:
            self._share_buffers(self.student)
        self.average.follow(decay)
        return MethodOutput.joined(outputs)

    def weak_pass(self, batch: Batch) -> WeakPass | None:
        """The weak views' own pass, see `weak_pass`; None where there is none."""
        train = self.setup.config.train
        return weak_pass(self.engine, self.method, self._rows, train, batch.views)

    def _by_image(self, batch: Batch) -> dict[str, Any]:
        """What the method asks for besides logits and features."""
        needs, found = self._needs, dict[str, Any]()
        for kind in needs.positions:
            found[f"{kind}_positions"] = getattr(batch, f"{kind}_positions")
        if needs.uniforms:
            found["uniform_labeled"] = batch.uniform_labeled
            found["uniform_unlabeled"] = batch.uniform_unlabeled
        if needs.head:
            found["head"] = head_of(self.student)
        return found

    @torch.no_grad()
    def _teacher_features(self, views: Tensor) -> dict[str, Any]:
        """`teacher_labeled` and so on: features [rows, D] of the averaged network."""
        asked = self._needs.teacher
        if not asked:
            return {}
        blocks = dict(zip(VIEWS, views.split(self._rows), strict=True))
        teacher, bf16 = self.average.module, self.setup.config.train.precision == "bf16"
        dtype = next(teacher.parameters()).dtype
        with torch.autocast(views.device.type, torch.bfloat16, enabled=bf16):
            output = teacher(torch.cat([blocks[view] for view in asked]).to(dtype))
        _, features = logits_and_features(output)
        assert features is not None
        parts = features.split([len(blocks[view]) for view in asked])
        return {f"teacher_{view}": part for view, part in zip(asked, parts, strict=True)}

    @torch.no_grad()
    def _constant_logits(self) -> dict[str, Any]:
        """`logits_constant`, of images that are one value in every pixel."""
        if not self._constant_images:
            return {}
        # One by one, as batch norm would mix them; their share of its statistics is none.
        with batch_norm_share(self.student, 0.0, first=True):
            found = [self.engine.forward(image)[0] for image in self._constant_images]
        return {"logits_constant": torch.cat(found)}

    @torch.no_grad()
    def network(self) -> nn.Module:
        """What the run is judged by and leaves behind: the average under the method's test rule.

        Returns:
            float [n, 3, H, W] to logits [n, K], of the weights as they are now; evaluation mode.
            For a method with one head and no rule of its own it is the average itself; LoRA is
            merged.
        """
        average = self.average.module
        if self._plain is None:
            return average
        # A test rule may look at images, also where the network has only seen features.
        whole = average if self._backbone is None else nn.Sequential(self._backbone, average)
        heads = Heads(*head_tensors(average, self.method.num_classes))
        weight, bias = self.method.test_head(heads, whole) or heads.plain(0)
        state, head = merged_state(average), head_of(self._plain)
        assert isinstance(head, nn.Linear)
        for name, tensor in self._plain.state_dict(keep_vars=True).items():
            if tensor is not head.weight and tensor is not head.bias:
                tensor.copy_(state[name])
        head.weight.copy_(weight)
        head.bias.copy_(bias)
        return self._plain


@dataclass(frozen=True)
class WeakPass:
    """The weak views' own pass, before that of the others.

    Attributes:
        output: of the m weak rows, without a graph.
        order: int64 [m], images that pass the threshold first, each group in the order of the
            batch; None with `strong_forward=all`.
        passing: int64 [], how many pass; None with `strong_forward=all`.
        part: images; a multiple of it runs.
    """

    output: NetworkOutput
    order: Tensor | None = None
    passing: Tensor | None = None
    part: int = 1

    def images(self) -> Tensor | None:
        """int64 [n], whose strong views run; None: all. Waits for the device.

        Those that fill up the last part are images of the batch that do not pass: batch norm needs
        no mask for them, and the loss leaves them out as it always does.
        """
        if self.order is None or self.passing is None:
            return None
        number = -(-int(self.passing) // self.part) * self.part
        return self.order[: number if self.part == 1 else max(number, self.part)]


def weak_pass(
    engine: Engine, method: Method, rows: Sequence[int], train: TrainConfig, views: Tensor
) -> WeakPass | None:
    """The weak views through the network, without a backward pass; None: with the others.

    `weak_forward=concat` is the published recipe: one pass over all rows, so that batch norm
    normalises them together and the weak rows, which carry no loss, still cost a backward pass
    through its statistics.

    `weak_forward=no_grad` runs the weak rows first, and then the others. Each pass is normalised
    by the statistics of its own rows. The running statistics move once per step by the momentum of
    the network, towards the mean of both passes weighted by their rows, as one pass would move
    them (short of the variance between the passes' means).

    `strong_forward=confident` also leaves out strong views that the loss will not look at. Weights
    of the running statistics are those of `strong_forward=all`. Under `train.compile` the number
    of images is rounded up to a seventh of the batch, for static shapes.

    With several ranks every rank runs the same passes, so that the collectives of synchronised
    batch norm match; its statistics are weighted by the ranks' rows.

    Args:
        rows: labeled (L*b), weak (m) and strong (V*m), the order of `views`.
        train: `weak_forward`, `strong_forward`, `compile`.
        views: [L*b + (1+V)*m, 3, H, W].
    """
    if train.weak_forward == "concat":
        return None
    num_labeled, num_weak, _ = rows
    share = num_weak / sum(rows)
    with torch.no_grad(), batch_norm_share(engine.module, share, first=True):
        output = engine.forward(views[num_labeled : num_labeled + num_weak])
    if train.strong_forward == "all":
        return WeakPass(output)
    mask = method.confident(output[0])
    order = mask.to(torch.uint8).argsort(descending=True, stable=True)
    part = 1 if train.compile == "none" else -(-num_weak // PARTS)
    return WeakPass(output, order, mask.sum(), part)


def forward_views(
    engine: Engine,
    rows: Sequence[int],
    views: Tensor,
    weak: WeakPass | None,
    images: Tensor | None,
) -> list[NetworkOutput]:
    """All views through the network, but for the weak ones where they have been.

    Args:
        rows, views: as for `weak_pass`. weak: what it gave.
        images: int64 [n], whose strong views run, see `WeakPass.images`; None: all.

    Returns:
        (logits [rows, ...], features or None) of labeled, weak and strong views; strong rows that
        did not run are zeros.
    """
    if weak is None:
        logits, features = engine.forward(views)
        parts = [None] * 3 if features is None else features.split(list(rows))
        return list(zip(logits.split(list(rows)), parts, strict=True))
    num_labeled, num_weak, num_strong = rows
    first_strong = num_labeled + num_weak
    if images is None:
        trained = torch.cat([views[:num_labeled], views[first_strong:]])
    else:  # view-major, as all strong rows are
        of_views = torch.arange(0, num_strong, num_weak, device=images.device)
        chosen = (of_views[:, None] + images).flatten()
        labeled_rows = torch.arange(num_labeled, device=images.device)
        trained = take_rows(views, torch.cat([labeled_rows, first_strong + chosen]))
    with batch_norm_share(engine.module, 1 - num_weak / sum(rows), first=False):
        logits, features = engine.forward(trained)
    strong = logits[num_labeled:]
    if images is not None:
        strong = strong.new_zeros(num_strong, *strong.shape[1:]).index_copy(0, chosen, strong)
    if features is None:
        return [(logits[:num_labeled], None), weak.output, (strong, None)]
    of_strong = strong, features[num_labeled:]
    return [(logits[:num_labeled], features[:num_labeled]), weak.output, of_strong]


def take_rows(views: Tensor, rows: Tensor) -> Tensor:
    """Rows of [R, C, H, W] in channels_last, which a plain index_select would lose."""
    return views.permute(0, 2, 3, 1).index_select(0, rows).permute(0, 3, 1, 2)


def with_uniforms(batch: Batch, setup: Setup) -> Batch:
    """The batch with as many uniforms for each of its images as the method asks for."""
    number, ranks, layout = setup.needs.uniforms, setup.ranks, setup.layout
    if not number:
        return batch
    drawn = []
    for kind, count in enumerate((layout.labeled, layout.unlabeled)):
        start = ranks.rank * count
        values = uniforms(
            setup.config.seed, batch.step, kind, start=start, count=count, each=number
        )
        drawn.append(sent(values, ranks.device))
    return replace(batch, uniform_labeled=drawn[0], uniform_unlabeled=drawn[1])


def _in_weights_file(network: nn.Module, report: PretrainedReport | None) -> set[str]:
    """Names of what is frozen and came from the file, LoRA's base layers under their own names."""
    if report is None:
        return set()
    missing = set(report.missing)
    return {
        name
        for name in frozen_names(network)
        if missing.isdisjoint((name, name.replace(".base.", ".")))
    }
