"""The trainer: batches through the step, priors and evaluation every period, checkpoints."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import torch

from simpro_fast.answers.evaluation import Evaluation
from simpro_fast.config import Config
from simpro_fast.data.batch import Loader
from simpro_fast.data.datasets.registry import load_dataset
from simpro_fast.data.loader import build_loader
from simpro_fast.data.sampling.labeled_order import LabeledDraws
from simpro_fast.data.splits.build import make_split
from simpro_fast.distributed.process_group import Ranks
from simpro_fast.distributed.signals import Preempted
from simpro_fast.distributed.stop_requests import StopRequests
from simpro_fast.run.directory import RunDirectory
from simpro_fast.run.loggers import Loggers
from simpro_fast.training.banner import announce
from simpro_fast.training.begin import begin_run
from simpro_fast.training.checkpoints import Checkpoints
from simpro_fast.training.embed import cached
from simpro_fast.training.engine.optim import learning_rate
from simpro_fast.training.measure import evaluate_split, unlabeled_shares
from simpro_fast.training.metrics import (
    Meter,
    Stopwatch,
    ThresholdWatch,
    kl_of_estimate,
    period_row,
    step_profiler,
)
from simpro_fast.training.phases import begin_phase, rate_course
from simpro_fast.training.results import TrainedRun, finish_run
from simpro_fast.training.resume import agreed_fingerprint, find_state
from simpro_fast.training.setup import Setup, build_run_loader, resolved_data
from simpro_fast.training.state import RunState
from simpro_fast.training.step import Step, with_uniforms
from simpro_fast.training.step_graph import build_step_graph
from simpro_fast.training.step_guard import StepGuard
from simpro_fast.utils.local_files import repeated
from simpro_fast.utils.progress import RunProgress
from simpro_fast.utils.provenance import git_commit


class Trainer:
    """One run of one configuration on this rank.

    Args:
        config: the experiment.
        ranks: this process among all, see `start_ranks`.
        make_loader: `build_loader` (DALI) or a stand-in with its signature.
        write: False leaves no file behind (dry runs, benches).
        requests: to stop; None: nobody can ask for it.
    """

    def __init__(
        self,
        config: Config,
        ranks: Ranks,
        *,
        make_loader: Callable[..., Loader] = build_loader,
        write: bool = True,
        requests: StopRequests | None = None,
    ) -> None:
        self.write, self._writes = write, write and ranks.is_main
        self.requests = requests or StopRequests()
        self.run = RunDirectory(config.run_dir)
        self.commit = git_commit()  # now: the tree may change while the run goes on
        data, *by = resolved_data(config)
        dataset = load_dataset(data)
        split = make_split(config.data, dataset, config.seed)
        # Ranks with other data would train, and average, without an error.
        fingerprint = agreed_fingerprint(dataset, split, ranks)
        dataset, split = cached(config, dataset, split, fingerprint, ranks, write=write)
        self.setup = Setup(config, ranks, dataset, split, *by)
        if (given := self.setup.given_prior) is not None:
            fingerprint["prior"] = hashlib.sha256(repr(given).encode()).hexdigest()
        self.state = RunState(split)
        self._make_loader = make_loader
        found = find_state(config, self.run, fingerprint, ranks) if write else None
        self.algorithm = Step(self.setup, fresh=found is None)
        self.step_graph = build_step_graph(config, ranks, self.algorithm)
        self.guard = StepGuard(ranks, self.requests.asked)
        self.meter, self.stopwatch = Meter(ranks.device, dataset.num_classes), Stopwatch()
        self.checkpoints = Checkpoints(
            self.run, self.setup, self.algorithm, self.meter, fingerprint
        )
        checkpoint = None if found is None else self.checkpoints.resume(found, self.state)
        self.last_evaluation: Evaluation | None = None
        self._threshold_watch = ThresholdWatch(config.method.threshold)
        self._follow_split()
        self.loggers = Loggers()
        if write:
            self.loggers = begin_run(
                self.run,
                config,
                ranks,
                {"alpha": self.setup.alpha, **self.checkpoints.fingerprint},
                split=split,
                dataset=dataset,
                pretrained=self.algorithm.pretrained,
                checkpoint=checkpoint,
                step=self.step,
                unfinished=self.state.row is not None,
            )
        self.progress = RunProgress(
            config.log.progress, config.train.steps, self.setup.views_per_step, main=ranks.is_main
        )

    @property
    def step(self) -> int:
        """Steps trained."""
        return self.state.step

    def train_step(self) -> None:
        """Take this step's batch, drawn ahead by the loader, and train on it: `Step.step`."""
        step, config, algorithm = self.step, self.setup.config, self.algorithm
        self._begin_phase()
        self.stopwatch.start()
        batch = with_uniforms(self.loader.next(step), self.setup)
        self.stopwatch.data_arrived()

        # Of this step within its schedule: a method that begins again has several in a run.
        since, length = rate_course(config, algorithm.method, step)
        lr, decay = learning_rate(config.optim, since, length), algorithm.average.decay_at(since)
        if self.step_graph is None:
            out = algorithm.step(batch, lr, decay, lambda loss: self.guard.watch(loss, step))
        else:  # one CUDA graph: the loss can be looked at only when all of it has run
            out = self.step_graph(batch, lr, decay)
            self.guard.watch(out.loss, step)
        algorithm.method.end_step(step)
        self.meter.add(out, batch.truth)
        self.state.step = step + 1
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
        config, started, state = self.setup.config, time.perf_counter(), self.state
        self.announce()
        trace = self.run.path / "trace.json" if self._writes and config.train.profile else None
        seconds_before = state.seconds
        self.progress.begin(self.step)
        with closing(self.progress), step_profiler(trace) as profiler:
            if self.step and self.checkpoints.saved_step is None:
                self.save()  # it goes on from another run's checkpoint
            if state.row is not None:
                self._finish_period()
            while self.step < config.train.steps:
                self.train_step()
                if profiler is not None:
                    profiler.step()
                state.seconds = seconds_before + time.perf_counter() - started
                last, stop = self.step == config.train.steps, self.guard.stop_agreed
                if self.step % config.train.period == 0 or last:
                    self._end_period()
                # Before the evaluation, which may take longer than a stop has time for: a run
                # that goes on from here evaluates first.
                if self.step % config.checkpoint.every == 0 or last or stop:
                    self.save()
                if stop:
                    raise self._preempted()
                if state.row is not None:
                    self._finish_period()
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
            dataset=setup.dataset,
            normalised_by=setup.normalised_by,
            interpolated_by=setup.interpolated_by,
        )

    def _end_period(self) -> None:
        """Update of the priors, and the row of metrics but for its evaluation."""
        # The last losses are read only now, and priors must not move by steps that went wrong.
        self.guard.settle()
        method, config, step = self.algorithm.method, self.setup.config, self.step
        averages = self.meter.finish(self.setup.ranks)
        if step % config.train.period == 0:
            method.end_period()
        lr = learning_rate(config.optim, *rate_course(config, method, step - 1))
        begun = (step - 1) // config.train.period * config.train.period
        draws = self.labeled_draws.counts(begun, step)
        self.state.row = period_row(self.setup, method, step, lr, draws, self.stopwatch) | averages
        self.stopwatch = Stopwatch()
        self._threshold_watch.period(averages["mask_rate"])

    def _finish_period(self) -> None:
        """Evaluate where it is due, and write the row of metrics.

        Raises:
            Preempted: some rank was asked to stop; the checkpoint holds the row as it was.
        """
        assert self.state.row is not None
        config, row = self.setup.config, self.state.row
        last = self.step == config.train.steps
        if last or self.step % (config.train.period * config.evaluate.every) == 0:
            self.last_evaluation = found = self.evaluate(temperature=last)
            if found is not None:
                self.state.top1.append(found.top1)
                measured = {"top1": found.top1, "top1_class_mean": found.top1_class_mean}
                row = {**row, **measured, "per_class": found.per_class}
        self.state.row = None
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
        if self.checkpoints.saved_step != self.step:
            self.save()
        saved = self.step if self.checkpoints.saved_step == self.step else None
        return Preempted(saved)

    def _show_progress(self, loss: float, mask_rate: float) -> None:
        top1 = self.state.top1[-1] if self.state.top1 else None
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
        method, split = self.algorithm.method, self.state.split
        phase = method.phase_at(self.step // self.setup.config.train.period)
        if phase == method.phase:
            return
        if self.checkpoints.saved_step != self.step:
            self.save()  # what follows may look at every image, and can be stopped
        self.guard.settle()
        if self.step_graph is not None:  # within a phase every step is the same, and no longer
            self.step_graph.forget()
        self.state.split = begin_phase(
            self.algorithm, self.setup, split, phase, self.step, self._look_for_a_stop
        )
        if self.state.split is not split:  # images have joined the labeled ones
            self.loader.close()
            self._follow_split()

    def _follow_split(self) -> None:
        """Draw from the split as it is now."""
        config, dataset, split = self.setup.config, self.setup.dataset, self.state.split
        self.loader = build_run_loader(
            self.setup, split, start_step=self.step, make_loader=self._make_loader
        )
        targets = split.targets(dataset)
        self.labeled_draws = LabeledDraws(config.data, targets, dataset.num_classes, config.seed)

    def save(self) -> None:
        """Checkpoint of this step, see `Checkpoints.save`; every rank calls it."""
        if self.write:
            self.guard.settle()
            self.checkpoints.save(self.state)

    def _finish(self) -> dict[str, Any]:
        """The last work of the run, see `finish_run`."""
        setup, ranks = self.setup, self.setup.ranks
        counts = torch.tensor([float(getattr(self.loader, "replaced", 0)), repeated.count])
        replaced, tried_again = ranks.sum(counts.double().to(ranks.device)).tolist()
        evaluation = self.last_evaluation or self.evaluate(temperature=True)
        joined = self.state.split.pseudo_labeled
        trained = TrainedRun(
            setup=setup,
            algorithm=self.algorithm,
            state=self.state,
            evaluation=evaluation,
            shares=unlabeled_shares(
                self.algorithm.network(), setup, evaluation, between=self._look_for_a_stop
            ),
            labeled_draws=self.labeled_draws.counts(joined.since if joined else 0, self.step),
            images_replaced=int(replaced),
            reads_repeated=int(tried_again),
            commit=self.commit,
        )
        saved = self.checkpoints.saved_step == self.step or not self.write
        return finish_run(
            self.run, trained, self.loader, self.loggers, saved=saved, write=self._writes
        )

    def close(self) -> None:
        """Free the pipeline; harmless when repeated."""
        self.progress.close()
        self.loader.close()
        self.loggers.close(self.step, finished=False)
