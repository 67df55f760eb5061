"""The checkpoints of a run: its state on disk, and put back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from simpro_fast.run.checkpoint import save_on_main
from simpro_fast.run.directory import RunDirectory
from simpro_fast.training.metrics import Meter
from simpro_fast.training.resume import load_state
from simpro_fast.training.setup import Setup
from simpro_fast.training.state import (
    RunState,
    gather_counts,
    load_run_tensors,
    rank_counts,
    refuse_non_finite,
    run_tensors,
    scatter_counts,
)
from simpro_fast.training.step import Step


class Checkpoints:
    """Saves what training depends on, and goes on from it.

    Args:
        run: where they lie.
        setup, algorithm, meter: of the run.
        fingerprint: digests of data, split, files and initial weights.

    Attributes:
        saved_step: of the newest checkpoint; None: there is none, or it could not be saved.
    """

    def __init__(
        self,
        run: RunDirectory,
        setup: Setup,
        algorithm: Step,
        meter: Meter,
        fingerprint: dict[str, str],
    ) -> None:
        self._run, self._setup, self._algorithm = run, setup, algorithm
        self._meter = meter
        self.fingerprint = fingerprint
        if algorithm.pretrained is not None:
            self.fingerprint["weights"] = algorithm.pretrained.sha256
        self.saved_step: int | None = None

    def state_dict(self, state: RunState) -> dict[str, Any]:
        """Everything that training depends on, equal on all ranks; see `training.state`.

        Every rank calls it, since rank-local state is gathered.
        """
        ranks = self._setup.ranks
        return {
            "step": state.step,
            "tensors": run_tensors(self._algorithm, state),
            "per_rank": gather_counts(rank_counts(self._algorithm, self._meter), ranks),
            "row": state.row or {},
            "config": self._setup.config.model_dump(mode="json"),
            "fingerprint": self.fingerprint,
        }

    def load_state_dict(self, saved: dict[str, Any], state: RunState) -> None:
        """Put back what `state_dict` gave, whatever the number of ranks was then.

        Raises:
            UserError: a weight is not finite, or it is of another network; other misfits raise
                what `load_run_tensors` raises.
        """
        load_run_tensors(saved["tensors"], self._algorithm, state, self._setup.split)
        counts = rank_counts(self._algorithm, self._meter)
        scatter_counts(saved["per_rank"], counts, self._setup.ranks)
        self.fingerprint = {**saved["fingerprint"], **self.fingerprint}
        state.step, state.row = saved["step"], saved["row"] or None

    def resume(self, found: tuple[Path, dict[str, Any]], state: RunState) -> Path:
        """Go on from what `find_state` has found; returns the checkpoint that fits the run."""
        setup, run = self._setup, self._run
        path = load_state(
            found,
            lambda saved: self.load_state_dict(saved, state),
            setup.config,
            self.fingerprint,
            setup.ranks,
        )
        if not run.owns(path):
            return path
        self.saved_step = state.step
        # It was saved before the evaluation, which an earlier start may have finished.
        is_main = setup.ranks.is_main
        mine = run.row_of(state.step) if is_main and state.row is not None else None
        row = json.loads(setup.ranks.gather_bytes(json.dumps(mine).encode())[0])
        if row is not None:
            state.row = None
            if row.get("top1") is not None:
                state.top1.append(row["top1"])
        return path

    def save(self, state: RunState) -> None:
        """Checkpoint of this step. Every rank calls it, since rank-local state is gathered.

        With `checkpoint.on_error=continue` a disk that refuses it is a warning.

        Raises:
            UserError: the weights are not finite, or the disk is full; nothing is overwritten.
        """
        saved, setup = self.state_dict(state), self._setup
        refuse_non_finite(saved["tensors"], state.step)
        folder, checkpoint = self._run.checkpoints, setup.config.checkpoint
        done = save_on_main(folder, saved, checkpoint, setup.ranks)
        self.saved_step = state.step if done else None
