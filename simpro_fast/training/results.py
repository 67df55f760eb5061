"""The end of a run: summary, exported model, report."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from simpro_fast.answers.evaluation import Evaluation, many_medium_few
from simpro_fast.answers.model_card import CARD, model_card
from simpro_fast.answers.model_file import (
    DESCRIPTION,
    WEIGHTS,
    ModelFile,
    shares,
    write_weights,
)
from simpro_fast.answers.report import write_report
from simpro_fast.answers.report.groups import group_runs
from simpro_fast.answers.report.pictures import FOLDER, TrainingViews, save_mistakes, save_views
from simpro_fast.answers.report.runs import load_run
from simpro_fast.answers.report.terminal import print_summary
from simpro_fast.data.batch import Loader
from simpro_fast.data.features import FeatureDataset
from simpro_fast.models.head import METHOD_PREFIX
from simpro_fast.run.directory import RunDirectory
from simpro_fast.run.loggers import Loggers
from simpro_fast.training.features import whole_network
from simpro_fast.training.labels_alone import labels_alone
from simpro_fast.training.metrics import kl_of_estimate
from simpro_fast.training.pictures import confident_mistakes, views_figure
from simpro_fast.training.setup import Setup
from simpro_fast.training.state import RunState
from simpro_fast.training.step import Step
from simpro_fast.utils.atomic_write import write_atomically, write_json
from simpro_fast.utils.errors import OutputError, PeerError
from simpro_fast.utils.machine import machine_name
from simpro_fast.utils.provenance import library_versions

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainedRun:
    """All that the summary and the exported model say of a run."""

    setup: Setup
    algorithm: Step
    state: RunState
    evaluation: Evaluation | None
    """Of the averaged weights as they are now; None without a test set."""
    shares: dict[str, Any] | None
    """Estimated class shares of the unlabeled images, see `training.measure.unlabeled_shares`."""
    labeled_draws: list[int]
    """Labeled images drawn per class."""
    images_replaced: int
    """Damaged images that others stood in for, on all ranks, since this process started."""
    reads_repeated: int
    """Reads of images that failed and were tried again, likewise."""
    commit: str | None


def finish_run(
    run: RunDirectory,
    trained: TrainedRun,
    loader: Loader,
    loggers: Loggers,
    *,
    saved: bool,
    write: bool,
) -> dict[str, Any]:
    """Summary of a trained run; on rank 0 also its files and the table on the terminal.

    Args:
        saved: whether its last checkpoint lies on disk.
        write: whether this rank writes.

    Raises:
        UserError: the last checkpoint could not be saved, or one of the files.
        PeerError: likewise, on the other ranks.
    """
    setup, step, summary = trained.setup, trained.state.step, summarise(trained)
    if write:
        views = None
        if setup.config.log.figures and not isinstance(setup.dataset, FeatureDataset):
            views = views_figure(
                loader.next(step), loader.describe(step), setup.layout, setup.dataset
            )
        figures = write_results(run, trained, summary, views, finished=saved)
        loggers.figures(figures, step)
        loggers.close(step, finished=saved)
    # No barrier: what rank 0 writes may take longer than the others may wait in a collective.
    if not saved:
        said = (
            f"trained to step {step}, but its checkpoint could not be saved (checkpoint.on_error="
            "continue); free some space and start again, which goes on from the last one that could"
        )
        main = setup.ranks.is_main
        raise OutputError(said) if main else PeerError(said, OutputError.exit_code)
    return summary


def write_results(
    run: RunDirectory,
    trained: TrainedRun,
    summary: dict[str, Any],
    views: TrainingViews | None,
    *,
    finished: bool,
) -> list[Path]:
    """The files of a trained run, and its table on the terminal.

    Args:
        views: None: no figures.
        finished: False leaves summary.json out, so that the next start goes on.

    Returns:
        the figures, PNG files.
    """
    setup = trained.setup
    file = export_model(run, trained)
    write_atomically(run.path / CARD, model_card(file, summary, setup.dataset.name))
    print_summary(summary)
    written: list[Path] = []
    if views is not None:
        folder = run.path / FOLDER
        save_views(views, folder)
        if trained.evaluation is not None:
            mistakes = confident_mistakes(trained.evaluation, setup.dataset, setup.split)
            save_mistakes(mistakes, folder)
        written = write_report(group_runs([load_run(run.path, summary)]), folder)
    if finished:  # last, since the presence of the file says so
        write_json(run.summary, summary)
    pages = [path for path in written if path.suffix == ".html"]
    logger.info("the run is in %s", pages[0] if pages else run.path)
    return [path for path in written if path.suffix == ".png"]


def summarise(trained: TrainedRun) -> dict[str, Any]:
    """The content of summary.json; accuracies in percent."""
    setup, state, evaluation = trained.setup, trained.state, trained.evaluation
    config, split = setup.config, setup.split
    top1 = state.top1 or ([evaluation.top1] if evaluation else [])
    per_class = evaluation.per_class if evaluation else None
    groups = many_medium_few(per_class or [None] * len(split.labeled_counts), split.labeled_counts)
    unlabeled = split.unlabeled_counts
    return {
        "name": config.name,
        "seed": config.seed,
        "method": config.method.name,
        "steps": state.step,
        "top1": evaluation.top1 if evaluation else None,
        "top1_class_mean": evaluation.top1_class_mean if evaluation else None,
        **labels_alone(setup),
        "top1_mean_last20": sum(top1[-20:]) / len(top1[-20:]) if top1 else None,
        "top1_best": max(top1, default=None),
        **_statistics(evaluation),
        "per_class": per_class,
        "class_names": list(setup.dataset.class_names),
        **groups,
        "shares": trained.shares,
        "kl_pi_u": kl_of_estimate(trained.algorithm.method, split),
        "pi_u": trained.algorithm.method.normalised_pi_u().tolist(),
        "pi_u_true": None if unlabeled is None else [c / sum(unlabeled) for c in unlabeled],
        "labeled_counts": list(split.labeled_counts),
        "labeled_draws": trained.labeled_draws,
        "unlabeled_counts": None if unlabeled is None else list(unlabeled),
        "images_replaced": trained.images_replaced,
        "reads_repeated": trained.reads_repeated,
        "seconds": state.seconds,
        "images_per_second": state.step * setup.views_per_step / state.seconds,
        "commit": trained.commit,
        "machine": machine_name(),
    }


def _statistics(evaluation: Evaluation | None) -> dict[str, Any]:
    """Return what summary.json says of the test besides top-1; model.json has large matrices."""
    if evaluation is None:
        keys = ("top_k", "top_k_accuracy", "ece", "log_likelihood", "temperature")
        return dict.fromkeys((*keys, "confusion", "reliability"))
    matrix = evaluation.confusion
    return {
        "top_k": evaluation.top_k,
        "top_k_accuracy": evaluation.top_k_accuracy,
        "ece": evaluation.ece,
        "log_likelihood": evaluation.log_likelihood,
        "temperature": evaluation.temperature,
        "confusion": matrix.tolist() if matrix is not None and len(matrix) <= 200 else None,
        "reliability": {"bins": evaluation.reliability},
    }


def export_model(run: RunDirectory, trained: TrainedRun) -> ModelFile:
    """`model.safetensors` and `model.json`: the EMA weights, float32, and what using them needs."""
    setup, method = trained.setup, trained.algorithm.method
    config, dataset = setup.config, setup.dataset
    network = whole_network(config, dataset, trained.algorithm.network())
    saved = {
        name: value.float() if value.is_floating_point() else value
        for name, value in network.state_dict().items()
        if not name.startswith(METHOD_PREFIX)
    }
    confusion = None if trained.evaluation is None else trained.evaluation.confusion
    description = ModelFile(
        weights_sha256=write_weights(run.path / WEIGHTS, saved),
        model=config.model.model_copy(update={"lora_rank": 0}),  # merged, see `Step.network`
        method=config.method.name,
        class_names=dataset.class_names,
        image_size=dataset.image_size,
        fit=dataset.fit,
        interpolation=dataset.interpolation,
        mean=dataset.mean,
        std=dataset.std,
        labeled_prior=shares(setup.split.labeled_counts),
        labeled_counts=tuple(setup.split.labeled_counts),
        phi=tuple(method.phi.tolist()),
        pi_u=tuple(method.normalised_pi_u().tolist()),
        tau=method.loss_tau,
        confusion=None if confusion is None else tuple(map(tuple, confusion.tolist())),
        temperature=None if trained.evaluation is None else trained.evaluation.temperature,
        step=trained.state.step,
        commit=trained.commit,
        versions={"simpro_fast": version("simpro_fast"), **library_versions()},
    )
    description.write(run.path / DESCRIPTION)
    return description
