"""The end of a run: summary, exported model, report."""

from __future__ import annotations

import importlib.util
import logging
import resource
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save

from simpro_fast.config import Config
from simpro_fast.evaluation import many_medium_few
from simpro_fast.report.figures import write_report
from simpro_fast.report.terminal import print_summary
from simpro_fast.run.tensorboard import lacks
from simpro_fast.run.views_figure import views_figure
from simpro_fast.utils.atomic_write import replacing, write_json
from simpro_fast.utils.machine import machine_name

if TYPE_CHECKING:
    from simpro_fast.training.trainer import Trainer

logger = logging.getLogger(__name__)


def check_report_packages(config: Config) -> None:
    """Find out before training, not after it, that figures cannot be drawn.

    Raises:
        UserError: naming the key, the package and the pip line.
    """
    for key, wanted, package in (
        ("log.figures", config.log.figures, "matplotlib"),
        ("log.tensorboard", config.log.tensorboard, "tensorboard"),
    ):
        if wanted and importlib.util.find_spec(package) is None:
            raise lacks(key, package)


def peak_memory_mib(device: torch.device) -> float:
    """Largest memory so far: of the GPU where there is one, else of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def finish_run(trainer: Trainer) -> dict[str, Any]:
    """Summary of a trained run; on rank 0 also its files and the table on the terminal."""
    summary = summarise(trainer)
    if trainer.write and trainer.ranks.is_main:
        export_model(trainer)
        print_summary(summary)
        if trainer.config.log.figures:
            for path in write_report(trainer.run.path, views_figure(trainer), summary=summary):
                logger.info("figure %s", path)
        # Last, since its presence says that the run is finished.
        write_json(trainer.run.summary, summary)
        logger.info("summary %s", trainer.run.summary)
    trainer.ranks.barrier()
    return summary


def summarise(trainer: Trainer) -> dict[str, Any]:
    """The content of summary.json: accuracies in percent, see design of the run directory."""
    config, split = trainer.config, trainer.split
    evaluation = trainer.last_evaluation or trainer.evaluate()
    top1 = trainer.history.top1 or ([evaluation.top1] if evaluation else [])
    per_class = evaluation.per_class if evaluation else None
    groups = many_medium_few(per_class or [None] * len(split.labeled_counts), split.labeled_counts)
    unlabeled = split.unlabeled_counts
    return {
        "name": config.name,
        "seed": config.seed,
        "method": config.method.name,
        "steps": trainer.step,
        "top1": evaluation.top1 if evaluation else None,
        "top1_class_mean": evaluation.top1_class_mean if evaluation else None,
        "top1_mean_last20": sum(top1[-20:]) / len(top1[-20:]) if top1 else None,
        "top1_best": max(top1, default=None),
        "per_class": per_class,
        "class_names": list(trainer.dataset.class_names),
        **groups,
        "kl_pi_u": trainer.kl_pi_u(),
        "pi_u": trainer.method.normalised_pi_u().tolist(),
        "pi_u_true": None if unlabeled is None else [c / sum(unlabeled) for c in unlabeled],
        "labeled_counts": list(split.labeled_counts),
        "labeled_draws": trainer.labeled_draws.counts(0, trainer.step),
        "unlabeled_counts": None if unlabeled is None else list(unlabeled),
        "images_replaced": _images_replaced(trainer),
        "seconds": trainer.history.seconds,
        "images_per_second": trainer.step * trainer.views_per_step / trainer.history.seconds,
        "commit": trainer.commit,
        "machine": machine_name(),
    }


def _images_replaced(trainer: Trainer) -> int:
    """Damaged images that others stood in for, on all ranks, since this process started."""
    mine = torch.tensor([float(getattr(trainer.loader, "replaced", 0))], dtype=torch.float64)
    return int(trainer.ranks.sum(mine.to(trainer.ranks.device)).item())


def export_model(trainer: Trainer) -> None:
    """`model.safetensors` and `model.json`: the EMA weights, float32, and what using them needs."""
    config, dataset = trainer.config, trainer.dataset
    weights = {
        name: (value.float() if value.is_floating_point() else value).contiguous().cpu()
        for name, value in trainer.ema.state_dict().items()
    }
    target = trainer.run.path / "model.safetensors"
    with replacing(target) as file:
        file.write(save(weights))
    write_json(
        trainer.run.path / "model.json",
        {
            "model": config.model.model_dump(mode="json"),
            "image_size": int(dataset.images.shape[1]),
            "mean": list(dataset.mean),
            "std": list(dataset.std),
            "class_names": list(dataset.class_names),
            "tau": config.method.tau,
            "pi_u": trainer.method.normalised_pi_u().tolist(),
            "phi": trainer.method.phi.tolist(),
            "step": trainer.step,
            "commit": trainer.commit,
        },
    )
