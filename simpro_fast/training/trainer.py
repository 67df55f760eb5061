"""The trainer: data, model, method and engine joined into Algorithm 1 of the SimPro paper."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import torch
from torch import Tensor

from simpro_fast.config import Config
from simpro_fast.data.batch import Batch, Loader
from simpro_fast.data.datasets.base import ArrayDataset
from simpro_fast.data.datasets.registry import load_dataset
from simpro_fast.data.loader import build_loader
from simpro_fast.data.splits.build import make_split
from simpro_fast.data.splits.split import Split
from simpro_fast.distributed.process_group import Ranks
from simpro_fast.engine.optim import learning_rate
from simpro_fast.errors import UserError
from simpro_fast.evaluation import Evaluation, kl_divergence
from simpro_fast.fault_tolerance.stop_requests import Preempted
from simpro_fast.fault_tolerance.watchdog import Watchdog
from simpro_fast.methods import MethodOutput
from simpro_fast.run.banner import announce
from simpro_fast.run.begin import begin_run
from simpro_fast.run.checkpoint import save_on_main
from simpro_fast.run.directory import RunDirectory
from simpro_fast.run.export import (
    TrainedRun,
    peak_memory_mib,
    summarise,
    unsaved_end,
    write_results,
)
from simpro_fast.run.loggers.base import Loggers
from simpro_fast.run.notebook_table import build_progress
from simpro_fast.run.pictures import views_figure
from simpro_fast.run.resume import agreed_fingerprint, find_state, load_state
from simpro_fast.training.build import build_loader_for
from simpro_fast.training.evaluate import estimate_shares, evaluate_split
from simpro_fast.training.method_inputs import with_uniforms
from simpro_fast.training.metrics import Meter, Stopwatch, ThresholdWatch, step_profiler
from simpro_fast.training.micro_batch import join_outputs, split_batch
from simpro_fast.training.parts import build_parts
from simpro_fast.training.phases import Labeled
from simpro_fast.training.state import History, gather_counts, scatter_counts
from simpro_fast.training.step_graph import build_step_graph
from simpro_fast.training.step_guard import (
    NonFiniteLossError,
    StepGuard,
    non_finite_part,
    refuse_non_finite,
)
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
        self.config, self.ranks, self.write = config, ranks, write
        self._writes = write and ranks.is_main
        self.watchdog = watchdog or Watchdog(config, ranks)
        self.run = RunDirectory(config.run_dir)
        self.commit = git_commit()  # now: the tree may change while the run goes on
        self.dataset: ArrayDataset = load_dataset(config.data)
        self.split: Split = make_split(config.data, self.dataset, config.seed)
        self.labeled = Labeled(config, self.dataset, self.split)
        self._make_loader = make_loader
        self.fingerprint = agreed_fingerprint(self.dataset, self.split, ranks)
        found = find_state(config, self.run, self.fingerprint, ranks) if write else None
        self._build_training(fresh=found is None)
        self.step = 0
        self._saved = True  # the checkpoint of the last turn, if there was one
        self.history = History()
        self.last_evaluation: Evaluation | None = None
        self.stopwatch = Stopwatch()
        self.loggers, checkpoint = Loggers(), None
        if found is not None:
            load = self.load_state_dict
            checkpoint = load_state(found, load, config, self.fingerprint, ranks)
        self.loader = self._build_loader()
        if write:
            self.loggers = begin_run(
                *(self.run, config, ranks, {"alpha": self.alpha, **self.fingerprint}),
                split=self.split,
                dataset=self.dataset,
                pretrained=self.pretrained,
                checkpoint=checkpoint,
                step=self.step,
            )
        self.progress = build_progress(
            config.log.progress, config.train.steps, self.views_per_step, main=ranks.is_main
        )

    def train_step(self) -> None:
        """One iteration of Algorithm 1 on this rank's share of the global batch.

        The views go through the network as `ViewForward` says; `inputs` adds what else the method
        asks for. The E step (pseudo-labels from the Bayes classifier with pi_u), the losses
        adjusted with phi and the class mass for the M step are the method's.
        """
        step, config = self.step, self.config
        self._follow_phase()
        self.stopwatch.start()
        batch = self.loader.next(step)
        batch = with_uniforms(batch, self.needs.uniforms, config.seed, self.layout, self.ranks)
        self.stopwatch.data_arrived()

        since, length = self.phases.course(step)
        lr, decay = learning_rate(config.optim, since, length), self.ema.decay_at(since)
        if self.step_graph is None:
            out = self.learn(batch, lr, decay)
        else:
            out = self.step_graph(batch, lr, decay)
            self.guard.watch(out.loss, step)
        self.method.end_step(step)
        self.meter.add(out, batch.truth)
        self.step = step + 1
        if self.progress.due():
            self._show_progress(float(out.loss.detach()), float(out.mask_rate))
        self.stopwatch.stop()

    def learn(self, batch: Batch, lr: float | Tensor, decay: float | Tensor) -> MethodOutput:
        """Losses, update of the weights and of their average, from one batch.

        Args:
            lr: learning rate of this step. decay: of the average; both numbers, or [].
        """
        outputs: list[MethodOutput] = []
        for micro in split_batch(batch, self.layout, self.micro_batches):
            part = self.method(**self.inputs(micro))
            outputs.append(part)
            if len(outputs) == self.micro_batches:
                out = join_outputs(outputs)
                if self.step_graph is None:  # else after the replay
                    self.guard.watch(out.loss, self.step)
            self.engine.backward(part.loss)
        self.engine.step(lr)
        if self.parts.share_buffers is not None:
            self.parts.share_buffers(self.model)
        self.ema.follow(decay)
        return out

    def fit(self) -> dict[str, Any]:
        """Train to `train.steps`, evaluate, save, report.

        Returns:
            The summary (the content of `summary.json`).

        Raises:
            UserError: a loss that is not finite, data or disk trouble. Checkpoints stay whole.
            Preempted: some rank was asked to stop; all ranks raise it after the same step.
        """
        config, started, watchdog = self.config, time.perf_counter(), self.watchdog
        self.announce()
        trace = self.run.path / "trace.json" if self._writes and config.train.profile else None
        seconds_before = self.history.seconds
        self.progress.begin(self.step)
        watchdog.begin(self.step)
        with closing(self.progress), self._explained(), step_profiler(trace) as profiler:
            while self.step < config.train.steps:
                self.train_step()
                watchdog.step_done(self.step)
                if profiler is not None:
                    profiler.step()
                self.history.seconds = seconds_before + time.perf_counter() - started
                last, stop = self.step == config.train.steps, self.guard.stop_agreed
                if self.step % config.train.period == 0 or last:
                    with watchdog.phase("evaluation"):
                        self._finish_period(last)
                saved = None
                if self.step % config.checkpoint.every == 0 or last or stop:
                    with watchdog.phase("saving"):
                        saved = self.save()
                if stop and not last:
                    raise Preempted(saved, agreed=True)
        with watchdog.phase("finishing"):
            return self._finish()

    def _finish(self) -> dict[str, Any]:
        """Summary of the trained run; on rank 0 also its files and the table on the terminal.

        Raises:
            UserError: the last checkpoint could not be saved, or one of the files.
            PeerError: likewise, on the other ranks.
        """
        replaced = torch.tensor([float(getattr(self.loader, "replaced", 0))], dtype=torch.float64)
        evaluation = self.last_evaluation or self.evaluate(temperature=True)
        heap = estimate_shares(
            *(self.predictor.network(), self.dataset, self.split, self.ranks, evaluation),
            self.config,
        )
        trained = TrainedRun(
            config=self.config,
            dataset=self.dataset,
            split=self.split,
            step=self.step,
            views_per_step=self.views_per_step,
            seconds=self.history.seconds,
            evaluation=evaluation,
            heap=heap,
            top1=self.history.top1,
            pi_u=self.method.normalised_pi_u().tolist(),
            phi=self.method.phi.tolist(),
            loss_tau=self.method.loss_tau,
            kl_pi_u=self.kl_pi_u(),
            labeled_draws=self.labeled.draws(self.labeled.since, self.step),
            images_replaced=int(self.ranks.sum(replaced.to(self.ranks.device)).item()),
            commit=self.commit,
        )
        summary = summarise(trained)
        if self._writes:
            views = None
            if self.config.log.figures:
                batch, draws = self.loader.next(self.step), self.loader.describe(self.step)
                views = views_figure(batch, draws, self.layout, self.dataset)
            figures = write_results(
                self.run, trained, summary, self.predictor.state_dict(), views, finished=self._saved
            )
            self.loggers.figures(figures, self.step)
            self.loggers.close(self.step, finished=self._saved)
        self.ranks.barrier()
        if self.write and not self._saved:
            raise unsaved_end(self.step, main=self.ranks.is_main)
        return summary

    def announce(self) -> None:
        """Device, ranks, batches and split, on rank 0."""
        announce(
            self.config,
            self.ranks,
            self.split,
            views_per_step=self.views_per_step,
            alpha=self.alpha,
            pretrained=self.pretrained,
        )

    def _finish_period(self, last: bool) -> None:
        """The M step (pi_u and phi), evaluation and one row of metrics."""
        self.guard.settle()
        config, row = self.config, self.meter.finish(self.ranks)
        if self.step % config.train.period == 0:
            self.method.end_period()
        evaluation = None
        if last or self.step % (config.train.period * config.evaluate.every) == 0:
            self.last_evaluation = evaluation = self.evaluate(temperature=last)
            if evaluation is not None:
                self.history.top1.append(evaluation.top1)
        kl_pi_u = self.kl_pi_u()
        period = -(-self.step // config.train.period)
        metrics = {
            "step": self.step,
            "period": period,
            "lr": learning_rate(config.optim, *self.phases.course(self.step - 1)),
            **row,
            "labeled_draws": self.labeled.draws((period - 1) * config.train.period, self.step),
            "pi_u": self.method.normalised_pi_u().tolist(),
            "phi": self.method.phi.tolist(),
            "kl_pi_u": kl_pi_u,
            "top1": evaluation.top1 if evaluation else None,
            "top1_class_mean": evaluation.top1_class_mean if evaluation else None,
            "per_class": evaluation.per_class if evaluation else None,
            "images_per_second": self.stopwatch.views_per_second(self.views_per_step),
            "data_wait_fraction": self.stopwatch.wait_fraction(),
            "peak_memory_mib": peak_memory_mib(self.ranks.device),
        }
        self.stopwatch = Stopwatch()
        self.threshold_watch.period(row["mask_rate"])
        self._show_progress(row["loss"] or 0.0, row["mask_rate"] or 0.0)
        if self._writes:
            self.run.append_metrics(metrics, config.checkpoint.on_error)
            self.loggers.write(metrics)

    def _show_progress(self, loss: float, mask_rate: float) -> None:
        top1 = self.history.top1[-1] if self.history.top1 else None
        self.progress.show(self.step, loss, mask_rate, self.kl_pi_u(), top1)

    def _build_training(self, *, fresh: bool) -> None:
        config, ranks = self.config, self.ranks
        self.parts = parts = build_parts(
            config, self.dataset, self.split, self.labeled, ranks, fresh=fresh
        )
        self.needs, self.pretrained, self.alpha = parts.needs, parts.pretrained, parts.alpha
        if self.pretrained is not None:
            self.fingerprint["weights"] = self.pretrained.sha256
        self.engine, self.model, self.ema = parts.engine, parts.engine.module, parts.ema
        self.method, self.predictor, self.phases = parts.method, parts.predictor, parts.phases
        self.inputs, self.layout = parts.inputs, parts.layout
        self.views_per_step = self.layout.rows * ranks.world_size
        self.micro_batches = config.micro_batches(ranks.world_size)
        self.step_graph = build_step_graph(config, ranks, self.learn)
        self.guard = StepGuard(ranks, lambda: self.watchdog.requests.requested)
        self.meter = Meter(ranks.device, self.dataset.num_classes)
        self.threshold_watch = ThresholdWatch(config.method.threshold)

    def evaluate(self, *, temperature: bool = False) -> Evaluation | None:
        """Top-1 of the EMA model on the test set by the method's rule (SimPro: argmax f(x)).

        None where there is no test set, as with own images without val.
        """
        size, network = self.config.evaluate.batch_size, self.predictor.network()
        return evaluate_split(
            network, self.dataset, self.split, self.ranks, size, temperature=temperature
        )

    def _build_loader(self) -> Loader:
        return build_loader_for(
            self.config,
            self.dataset,
            self.labeled.split,
            self.ranks,
            start_step=self.step,
            make_loader=self._make_loader,
        )

    def _follow_phase(self) -> None:
        """Before the first step of a new phase: what the method does there, and asks for."""
        if (phase := self.phases.due(self.step)) is None:
            return
        with self.watchdog.phase("a new phase of the method"):
            self.guard.settle()
            if self.phases.enter(phase, self.step):
                self.loader.close()
                self.loader = self._build_loader()
        if self.step_graph is not None:
            self.step_graph.forget()

    def kl_pi_u(self) -> float | None:
        """KL(true unlabeled distribution || estimate) in nats; None where the truth is unknown."""
        counts = self.split.unlabeled_counts
        return None if counts is None else kl_divergence(counts, self.method.normalised_pi_u())

    def state_dict(self) -> dict[str, Any]:
        """Everything that training depends on, as tensors and plain types, equal on all ranks.

        Every rank calls it, since rank-local state is gathered.
        """
        return {
            "step": self.step,
            **self.parts.state(),
            "accumulators": gather_counts(self._counts(), self.ranks),
            "top1": self.history.top1,
            "seconds": self.history.seconds,
            "fingerprint": self.fingerprint,
            "config": self.config.model_dump(mode="json"),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back what `state_dict` gave, whatever the number of ranks was then.

        Raises:
            UserError: a weight is not finite, or it is of another network; other mistakes raise
                what the parts raise.
        """
        if part := non_finite_part(state):
            raise UserError(f"a weight ({part}) is not finite")
        self.parts.load(state)
        scatter_counts(state["accumulators"], self._counts(), self.ranks)
        self.fingerprint = {**state["fingerprint"], **self.fingerprint}
        self.step = state["step"]
        self.history = History(list(state["top1"]), state["seconds"])

    def _counts(self) -> list[Tensor]:
        """What this rank has counted since the last update of the priors, float64 vectors."""
        counts = (getattr(self.method, name) for name in self.method.rank_counts)
        return [*counts, self.meter.sums, self.meter.class_sums]

    def save(self) -> int | None:
        """Checkpoint of this step. Every rank calls it, since rank-local state is gathered.

        Returns:
            the step if it was saved; None if it was not, as `checkpoint.on_error=continue` allows.

        Raises:
            UserError: the weights are not finite, or the disk is full; nothing is overwritten.
        """
        if not self.write:
            return None
        self.guard.settle()
        state = self.state_dict()
        refuse_non_finite(state, self.step)
        self._saved = save_on_main(self.run.checkpoints, state, self.config.checkpoint, self.ranks)
        return self.step if self._saved else None

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """A loss that is not finite, with what is needed to replay the step and to go on."""
        try:
            yield
        except NonFiniteLossError as error:
            step = error.step
            name = f"not_finite_step{step}_rank{self.ranks.rank}.json"
            path = self.run.path / name if self.write else None
            hint = self.run.describe_bad_step(path, lambda: self.loader.describe(step))
            raise NonFiniteLossError(step, hint) from None

    def close(self) -> None:
        """Free the pipeline; harmless when repeated."""
        self.progress.close()
        self.loader.close()
        self.loggers.close(self.step, finished=False)
