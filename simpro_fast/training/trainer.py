"""The trainer: batches through the step, priors and evaluation every period, checkpoints."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import torch

from simpro_fast.answers.evaluation import Evaluation
from simpro_fast.config import Config
from simpro_fast.data.batch import Loader
from simpro_fast.data.datasets.registry import load_dataset
from simpro_fast.data.loader import build_loader
from simpro_fast.data.sampling.labeled_order import LabeledDraws
from simpro_fast.data.splits.build import make_split
from simpro_fast.data.splits.split import Split
from simpro_fast.distributed.process_group import Ranks
from simpro_fast.distributed.signals import Preempted
from simpro_fast.distributed.watchdog import Watchdog
from simpro_fast.run.checkpoint import save_on_main
from simpro_fast.run.directory import RunDirectory
from simpro_fast.run.loggers import Loggers
from simpro_fast.training.banner import announce
from simpro_fast.training.begin import begin_run
from simpro_fast.training.engine.optim import learning_rate
from simpro_fast.training.measure import estimate_shares, evaluate_split
from simpro_fast.training.metrics import (
    Meter,
    Stopwatch,
    ThresholdWatch,
    peak_memory_mib,
    step_profiler,
)
from simpro_fast.training.phases import begin_phase, rate_course
from simpro_fast.training.pictures import views_figure
from simpro_fast.training.results import (
    TrainedRun,
    kl_of_estimate,
    summarise,
    unsaved_end,
    write_results,
)
from simpro_fast.training.resume import agreed_fingerprint, find_state, load_state
from simpro_fast.training.setup import Setup, build_run_loader
from simpro_fast.training.state import (
    History,
    gather_counts,
    load_history,
    load_run_tensors,
    rank_counts,
    refuse_non_finite,
    run_tensors,
    scatter_counts,
)
from simpro_fast.training.step import Step, with_uniforms
from simpro_fast.training.step_graph import build_step_graph
from simpro_fast.training.step_guard import NonFiniteLossError, StepGuard
from simpro_fast.utils.local_files import repeated
from simpro_fast.utils.progress import RunProgress
from simpro_fast.utils.provenance import git_commit

logger = logging.getLogger(__name__)


class Trainer:
    """One run of one configuration on this rank.

    Args:
        config: the experiment.
        ranks: this process among all, see `start_ranks`.
        make_loader: `build_loader` (DALI) or a stand-in with its signature.
        write: False leaves no file behind (dry runs, benches).
        watchdog: told what goes on, and asked whether to stop; None: nobody watches.
    """

    def __init__(
        self,
        config: Config,
        ranks: Ranks,
        *,
        make_loader: Callable[..., Loader] = build_loader,
        write: bool = True,
        watchdog: Watchdog | None = None,
    ) -> None:
        self.write = write
        self._writes = write and ranks.is_main
        self.watchdog = watchdog or Watchdog(config, ranks)
        self.run = RunDirectory(config.run_dir)
        self.commit = git_commit()  # now: the tree may change while the run goes on
        dataset = load_dataset(config.data)
        split = make_split(config.data, dataset, config.seed)
        self.setup = Setup(config, ranks, dataset, split)
        self.split = split
        """The split as it is now, with unlabeled images that the method has labeled."""
        self._make_loader = make_loader
        self.fingerprint = agreed_fingerprint(dataset, split, ranks)
        found = find_state(config, self.run, self.fingerprint, ranks) if write else None
        self.algorithm = Step(self.setup, fresh=found is None)
        pretrained = self.algorithm.pretrained
        if pretrained is not None:
            self.fingerprint["weights"] = pretrained.sha256
        self.step_graph = build_step_graph(config, ranks, self.algorithm.step)
        self.guard = StepGuard(ranks, lambda: self.watchdog.requests.reason is not None)
        self.meter = Meter(ranks.device, dataset.num_classes)
        self.step = 0
        """Steps trained."""
        self.row: dict[str, Any] | None = None
        """Metrics of a period that has ended and is not evaluated yet."""
        self._saved_step: int | None = None
        """Step of the newest checkpoint; None: there is none, or it could not be saved."""
        self.history = History()
        self.last_evaluation: Evaluation | None = None
        self.stopwatch = Stopwatch()
        self._threshold_watch = ThresholdWatch(config.method.threshold)
        self.loggers, checkpoint = Loggers(), None
        if found is not None:
            load = self.load_state_dict
            checkpoint = load_state(found, load, config, self.fingerprint, ranks)
            if self.run.owns(checkpoint):
                self._saved_step = self.step
                self._forget_row_that_is_written()
        self._follow_split(self.split)
        if write:
            self.loggers = begin_run(
                self.run,
                config,
                ranks,
                {"alpha": self.setup.alpha, **self.fingerprint},
                split=split,
                dataset=dataset,
                pretrained=pretrained,
                checkpoint=checkpoint,
                step=self.step,
                unfinished=self.row is not None,
            )
        self.progress = RunProgress(
            config.log.progress, config.train.steps, self.setup.views_per_step, main=ranks.is_main
        )

    def _forget_row_that_is_written(self) -> None:
        """A checkpoint is saved before the evaluation, which an earlier start may have finished."""
        ranks = self.setup.ranks
        mine = self.run.row_of(self.step) if ranks.is_main and self.row is not None else None
        row = json.loads(ranks.gather_bytes(json.dumps(mine).encode())[0])
        if row is not None:
            self.row = None
            if row.get("top1") is not None:
                self.history.top1.append(row["top1"])

    def train_step(self) -> None:
        """Draw the batch of this step and train on it; see `Step.step`."""
        step, config, algorithm = self.step, self.setup.config, self.algorithm
        self._begin_phase()
        self.stopwatch.start()
        batch = with_uniforms(self.loader.next(step), self.setup)
        self.stopwatch.data_arrived()

        since, length = rate_course(config, algorithm.method, step)
        lr, decay = learning_rate(config.optim, since, length), algorithm.average.decay_at(since)
        if self.step_graph is None:
            out = algorithm.step(batch, lr, decay, lambda loss: self.guard.watch(loss, step))
        else:
            out = self.step_graph(batch, lr, decay)
            self.guard.watch(out.loss, step)
        algorithm.method.end_step(step)
        self.meter.add(out, batch.truth)
        self.step = step + 1
        if self.progress.due():
            self._show_progress(float(out.loss.detach()), float(out.mask_rate))
        self.stopwatch.stop()

    def fit(self) -> dict[str, Any]:
        """Train to `train.steps`, evaluate, save, report.

        Returns:
            The summary (the content of `summary.json`).

        Raises:
            UserError: a loss that is not finite, data or disk trouble. Checkpoints stay whole.
            Preempted: some rank was asked to stop; all ranks raise it after the same step.
        """
        config, started, watchdog = self.setup.config, time.perf_counter(), self.watchdog
        self.announce()
        trace = self.run.path / "trace.json" if self._writes and config.train.profile else None
        seconds_before = self.history.seconds
        self.progress.begin(self.step)
        watchdog.begin(self.step)
        with closing(self.progress), self._explained(), step_profiler(trace) as profiler:
            if self.step and self._saved_step is None:
                self.save()  # it goes on from another run's checkpoint
            if self.row is not None:
                self._finish_period()
            while self.step < config.train.steps:
                self.train_step()
                watchdog.step_done(self.step)
                if profiler is not None:
                    profiler.step()
                self.history.seconds = seconds_before + time.perf_counter() - started
                last, stop = self.step == config.train.steps, self.guard.stop_agreed
                if self.step % config.train.period == 0 or last:
                    self._end_period()
                # Before the evaluation, which may take longer than a stop has time for: a run
                # that goes on from here evaluates first.
                if self.step % config.checkpoint.every == 0 or last or stop:
                    self.save()
                if stop:
                    raise self._preempted()
                if self.row is not None:
                    self._finish_period()
            with watchdog.phase("finishing"):
                return self._finish()

    def announce(self) -> None:
        """Device, ranks, batches and split, on rank 0."""
        setup = self.setup
        announce(
            setup.config,
            setup.ranks,
            setup.split,
            views_per_step=setup.views_per_step,
            alpha=setup.alpha,
            pretrained=self.algorithm.pretrained,
        )

    def _end_period(self) -> None:
        """The M step (pi_u and phi), and the row of metrics but for its evaluation."""
        self.guard.settle()
        setup, method = self.setup, self.algorithm.method
        config, averages = setup.config, self.meter.finish(setup.ranks)
        if self.step % config.train.period == 0:
            method.end_period()
        period = -(-self.step // config.train.period)
        first = (period - 1) * config.train.period
        self.row = {
            "step": self.step,
            "period": period,
            "lr": learning_rate(config.optim, *rate_course(config, method, self.step - 1)),
            **averages,
            "labeled_draws": self.labeled_draws.counts(first, self.step),
            "pi_u": method.normalised_pi_u().tolist(),
            "phi": method.phi.tolist(),
            "kl_pi_u": kl_of_estimate(method, setup.split),
            "top1": None,
            "top1_class_mean": None,
            "per_class": None,
            "images_per_second": self.stopwatch.views_per_second(setup.views_per_step),
            "data_wait_fraction": self.stopwatch.wait_fraction(),
            "peak_memory_mib": peak_memory_mib(setup.ranks.device),
        }
        self.stopwatch = Stopwatch()
        self._threshold_watch.period(averages["mask_rate"])

    def _finish_period(self) -> None:
        """Evaluate where it is due, and write the row of metrics.

        Raises:
            Preempted: some rank was asked to stop; the checkpoint holds the row as it was.
        """
        assert self.row is not None
        config, row = self.setup.config, self.row
        last = self.step == config.train.steps
        if last or self.step % (config.train.period * config.evaluate.every) == 0:
            with self.watchdog.phase("evaluation"):
                self.last_evaluation = found = self.evaluate(temperature=last)
            if found is not None:
                self.history.top1.append(found.top1)
                measured = {"top1": found.top1, "top1_class_mean": found.top1_class_mean}
                row = {**row, **measured, "per_class": found.per_class}
        self.row = None
        self._show_progress(row["loss"] or 0.0, row["mask_rate"] or 0.0)
        if self._writes:
            self.run.append_metrics(row, config.checkpoint.on_error)
            self.loggers.write(row)

    def _look_for_a_stop(self) -> None:
        """Between two batches of work that is not training; every rank calls it together.

        Raises:
            Preempted: some rank was asked to stop; a checkpoint of this step is there.
        """
        if self.guard.asked_to_stop():
            raise self._preempted()

    def _preempted(self) -> Preempted:
        if self._saved_step != self.step:
            self.save()
        saved = self.step if self._saved_step == self.step else None
        return Preempted(saved, agreed=True)

    def _show_progress(self, loss: float, mask_rate: float) -> None:
        top1 = self.history.top1[-1] if self.history.top1 else None
        kl_pi_u = kl_of_estimate(self.algorithm.method, self.setup.split)
        self.progress.show(self.step, loss, mask_rate, kl_pi_u, top1)

    def evaluate(self, *, temperature: bool = False) -> Evaluation | None:
        """Top-1 of the averaged network on the test set by the method's rule (SimPro: argmax f).

        None where there is no test set, as with own images without val.
        """
        return evaluate_split(
            self.algorithm.network(),
            self.setup,
            temperature=temperature,
            between=self._look_for_a_stop,
        )

    def _begin_phase(self) -> None:
        """Before the first step of a new phase: what the method does there, and asks for."""
        method = self.algorithm.method
        phase = method.phase_at(self.step // self.setup.config.train.period)
        if phase == method.phase:
            return
        if self._saved_step != self.step:
            self.save()  # what follows may look at every image, and can be stopped
        with self.watchdog.phase("a new phase of the method"):
            self.guard.settle()
            look = self._look_for_a_stop
            split = begin_phase(self.algorithm, self.setup, self.split, phase, self.step, look)
            if split is not self.split:
                self.loader.close()
                self._follow_split(split)
        if self.step_graph is not None:
            self.step_graph.forget()

    def _follow_split(self, split: Split) -> None:
        """Draw from this split from here on."""
        config, dataset = self.setup.config, self.setup.dataset
        self.split = split
        self.loader = build_run_loader(
            self.setup, split, start_step=self.step, make_loader=self._make_loader
        )
        targets = split.targets(dataset)
        self.labeled_draws = LabeledDraws(config.data, targets, dataset.num_classes, config.seed)

    def state_dict(self) -> dict[str, Any]:
        """Everything that training depends on, equal on all ranks; see `training.state`.

        Every rank calls it, since rank-local state is gathered.
        """
        counts = rank_counts(self.algorithm, self.meter)
        return {
            "step": self.step,
            "tensors": run_tensors(self.algorithm, self.history, self.split),
            "per_rank": gather_counts(counts, self.setup.ranks),
            "row": self.row or {},
            "config": self.setup.config.model_dump(mode="json"),
            "fingerprint": self.fingerprint,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back what `state_dict` gave, whatever the number of ranks was then.

        Raises:
            UserError: a weight is not finite, or it is of another network; other misfits raise
                what `load_run_tensors` raises.
        """
        self.split = load_run_tensors(state["tensors"], self.algorithm, self.setup.split)
        counts = rank_counts(self.algorithm, self.meter)
        scatter_counts(state["per_rank"], counts, self.setup.ranks)
        self.fingerprint = {**state["fingerprint"], **self.fingerprint}
        self.step = state["step"]
        self.history, self.row = load_history(state["tensors"]), state["row"] or None

    def save(self) -> None:
        """Checkpoint of this step. Every rank calls it, since rank-local state is gathered.

        With `checkpoint.on_error=continue` a disk that refuses it is a warning.

        Raises:
            UserError: the weights are not finite, or the disk is full; nothing is overwritten.
        """
        if not self.write:
            return
        with self.watchdog.phase("saving"):
            self.guard.settle()
            state, setup = self.state_dict(), self.setup
            refuse_non_finite(state["tensors"], self.step)
            folder = self.run.checkpoints
            saved = save_on_main(folder, state, setup.config.checkpoint, setup.ranks)
            self._saved_step = self.step if saved else None

    def _finish(self) -> dict[str, Any]:
        """Summary of the trained run; on rank 0 also its files and the table on the terminal.

        Raises:
            UserError: the last checkpoint could not be saved, or one of the files.
            PeerError: likewise, on the other ranks.
        """
        setup, ranks = self.setup, self.setup.ranks
        counts = torch.tensor([float(getattr(self.loader, "replaced", 0)), repeated.count])
        replaced, tried_again = ranks.sum(counts.double().to(ranks.device)).tolist()
        evaluation = self.last_evaluation or self.evaluate(temperature=True)
        joined = self.split.pseudo_labeled
        since = 0 if joined is None else joined.since
        trained = TrainedRun(
            setup=setup,
            algorithm=self.algorithm,
            step=self.step,
            history=self.history,
            evaluation=evaluation,
            heap=estimate_shares(
                self.algorithm.network(), setup, evaluation, between=self._look_for_a_stop
            ),
            labeled_draws=self.labeled_draws.counts(since, self.step),
            images_replaced=int(replaced),
            reads_repeated=int(tried_again),
            commit=self.commit,
        )
        summary = summarise(trained)
        finished = self._saved_step == self.step or not self.write
        if self._writes:
            views = None
            if setup.config.log.figures:
                batch, draws = self.loader.next(self.step), self.loader.describe(self.step)
                views = views_figure(batch, draws, setup.layout, setup.dataset)
            figures = write_results(self.run, trained, summary, views, finished=finished)
            self.loggers.figures(figures, self.step)
            self.loggers.close(self.step, finished=finished)
        # No barrier: what rank 0 writes may take longer than the others may wait in a collective.
        if not finished:
            raise unsaved_end(self.step, main=ranks.is_main)
        return summary

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """A loss that is not finite, with what is needed to replay the step and to go on."""
        try:
            yield
        except NonFiniteLossError as error:
            step = error.step
            name = f"not_finite_step{step}_rank{self.setup.ranks.rank}.json"
            path = self.run.path / name if self.write else None
            hint = self.run.describe_bad_step(path, lambda: self.loader.describe(step))
            raise NonFiniteLossError(step, hint) from None

    def close(self) -> None:
        """Free the pipeline; harmless when repeated."""
        self.progress.close()
        self.loader.close()
        self.loggers.close(self.step, finished=False)
