"""Checks that do a little of the real work: decode, make views, train, compare the kernels."""

from __future__ import annotations

import io
import time
from collections.abc import Callable

import numpy as np
import torch
from PIL import Image
from simpro_kernels import adjusted_cross_entropy, pseudo_label_cross_entropy
from simpro_kernels.dispatch import choose

from simpro_fast.cli.checks.table import Line
from simpro_fast.config import Config
from simpro_fast.distributed.process_group import Ranks
from simpro_fast.training.dry_run import seconds_per_step
from simpro_fast.training.trainer import Trainer
from simpro_fast.utils.progress import clock

SECONDS = 1.0
"""How long each speed is measured."""
# Rounding of float32 sums over a thousand classes stays far below this.
_TOLERANCE = 1e-4


def check_decoding(ranks: Ranks) -> Line:
    """Images a second of DALI's JPEG decoder, 256 x 256 pixels, on one thread of the processor."""
    from nvidia.dali import fn, pipeline_def

    rng = np.random.default_rng(1)
    coarse = Image.fromarray(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8))
    file = io.BytesIO()
    coarse.resize((256, 256), Image.Resampling.BILINEAR).save(file, "JPEG", quality=90)
    batch = [np.frombuffer(file.getvalue(), np.uint8)] * 16

    @pipeline_def(batch_size=len(batch), num_threads=1, device_id=None, exec_dynamic=True)
    def decode():  # type: ignore[no-untyped-def]
        return fn.decoders.image(fn.external_source(lambda: batch), device="cpu")

    pipeline = decode()
    pipeline.build()
    rate = _rate(lambda: pipeline.run(), len(batch))
    return Line("ok", f"{rate:,.0f} JPEG images/s of 256 px on one thread")


def check_views(config: Config, ranks: Ranks) -> Line:
    """Views a second of the data pipeline alone, decoding included."""
    trainer = Trainer(config, ranks, write=False)
    try:
        steps = iter(range(10**6))
        rate = _rate(lambda: trainer.loader.next(next(steps)), trainer.setup.views_per_step)
    finally:
        trainer.close()
    per_rank = f", {rate / ranks.world_size:,.0f} per rank" if ranks.world_size > 1 else ""
    side = trainer.setup.dataset.image_size
    return Line("ok", f"{rate:,.0f} augmented views/s of {side} px from {_what(config)}{per_rank}")


def _what(config: Config) -> str:
    data = config.data
    if data.name != "images":
        return data.name
    return "the packed images" if data.packed else "the image files"


def _rate(work: Callable[[], object], count: int) -> float:
    """Things a second, `count` of them in each call."""
    for _ in range(2):
        work()
    started, calls = time.perf_counter(), 0
    while time.perf_counter() - started < SECONDS:
        work()
        calls += 1
    return calls * count / (time.perf_counter() - started)


def check_training(config: Config, ranks: Ranks, *, whole: bool) -> Line:
    """Some steps of the real trainer over all ranks; with `whole`, how long the run would take."""
    trainer = Trainer(config, ranks, write=False)
    try:
        trainer.train_step()
        seconds = seconds_per_step(trainer)
        loss = trainer.meter.finish(ranks)["loss"]
    finally:
        trainer.close()
    text = (
        f"{config.model.name} on {_what(config)}, engine {config.distributed.engine}: "
        f"loss {loss:.3f}, {seconds:.3g} s/step of {trainer.setup.views_per_step} views"
    )
    if whole:
        text += f", {config.train.steps} steps in about {clock(config.train.steps * seconds)}"
    if loss is None or not np.isfinite(loss):
        return Line("problem", text, "please report this table as an issue")
    return Line("ok", text)


def check_kernels(ranks: Ranks) -> Line:
    """Both loss kernels as `impl=auto` runs them, loss and gradient, against float64 references."""
    worst = 0.0
    for classes in (10, 1000):
        for kernel in (_pseudo, _adjusted):
            worst = max(worst, _error(kernel, classes, ranks.device))
    probe = torch.zeros(1, 10, device=ranks.device)
    impl = choose("pseudo_label_cross_entropy", "auto", probe)
    text = (
        f"impl={impl} on {ranks.device.type}: losses and gradients within {worst:.0e} "
        "of the float64 reference"
    )
    if not worst < _TOLERANCE:
        cure = "set method.impl=eager, and please report this table as an issue"
        return Line("problem", text, cure)
    return Line("ok", text)


def _error(
    kernel: Callable[[torch.Tensor, str], torch.Tensor], classes: int, device: torch.device
) -> float:
    """Largest error of loss and gradient, relative to the largest value of the reference."""
    generator = torch.Generator().manual_seed(classes)
    logits = 4 * torch.randn(96, classes, generator=generator)
    results = []
    for given, impl in ((logits.to(device), "auto"), (logits.double(), "eager")):
        given.requires_grad_()
        loss = kernel(given, impl)
        (gradient,) = torch.autograd.grad(loss, given)
        results.append(torch.cat([loss.reshape(1), gradient.flatten()]).detach().cpu().double())
    ours, reference = results
    return float((ours - reference).abs().max() / reference.abs().max())


def _pseudo(logits: torch.Tensor, impl: str) -> torch.Tensor:
    weak, strong = logits[:32].detach(), logits[32:]
    prior = torch.linspace(-1, 1, logits.shape[1], device=logits.device)
    return pseudo_label_cross_entropy(weak, strong, prior, prior.flip(0), 0.3, impl=impl).loss


def _adjusted(logits: torch.Tensor, impl: str) -> torch.Tensor:
    targets = torch.arange(48, device=logits.device) % logits.shape[1]
    prior = torch.linspace(-1, 1, logits.shape[1], device=logits.device)
    return adjusted_cross_entropy(logits, targets, prior, impl=impl)
