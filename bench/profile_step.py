"""What one training step is made of: time by part, operators, and waits for the device.

    python bench/profile_step.py [--config fashion_mnist_lt/reversed] [--steps 20] [key.sub=value]

The trainer's own `train_step` on one resident synthetic batch, so it needs neither DALI nor files
of a data set's size; `distributed.engine=plain` does without DeepSpeed. Parts are timed by
wrapping the objects that the step calls. On the CPU the time is that of the main thread, so that
neighbours on the machine do not count (use `train.threads=1`, the default here); on CUDA the
device is waited for after each part, so the parts add up but do not overlap as they do in training.

    forward     the network, all passes           backward    gradients down to the logits' inputs
    optimizer   clipping, update, all-reduces     overhead    everything else:
    method      losses, pseudo-labels, counts     guard, ema, meter, other

`operators` are dispatcher calls of the part (backward's are those of autograd's thread as well),
`reads` those that make the host wait for a value (`.item()` and the like). `--top 8` also names
the operators that take most of the time, by torch's profiler over two steps. `--kinds` adds up the
time by kind, of kernels on the device where there is one, else of operators: loss, batch norm,
convolution (and matrix product), activation, optimizer and average, copy (and fill), other.

`--output FILE` adds the rows to a CSV, `--label` names them there.
"""

from __future__ import annotations

import argparse
import csv
import re
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from simpro_fast.config import load_config
from simpro_fast.data.pipeline.synthetic_loader import SyntheticLoader
from simpro_fast.distributed.environment import check_launch
from simpro_fast.distributed.process_group import start_ranks, stop_ranks
from simpro_fast.training.trainer import Trainer
from simpro_fast.utils.machine import machine_name
from simpro_fast.utils.provenance import git_commit

WARM_UP = 3
PARTS = ("data", "forward", "method", "guard", "backward", "optimizer", "ema", "meter")
# Operators whose result depends on values, for which the host waits.
READS = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "unique2")
KINDS = {
    "loss": r"rows?_kernel|tile_kernel|wide_kernel|reduce_partials|softmax"
    r"|nll_loss|pseudo_label_cross",
    "batch norm": r"batch_?norm|bn_|\b(statistics|merge|apply|sums|gradient)_kernel",
    "convolution": r"conv|gemm|xmma|cutlass|cudnn|implicit|[dw]grad|fprop|addmm|::mm\b|::linear",
    "activation": r"relu",
    "optimizer and average": r"multi_tensor|foreach|fused_sgd|FusedSgd|lerp",
    "copy": r"copy|memcpy|memset|fill|zero_",
}
"""Kind of a kernel or operator to what its name contains."""


class Parts:
    """Wraps what a step calls; collects each part's seconds and operators."""

    def __init__(self, trainer: Trainer) -> None:
        self.device = trainer.setup.ranks.device
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.current = "other"
        for part, owner, name in (
            ("data", trainer.loader, "next"),
            ("forward", trainer.algorithm.engine, "forward"),
            ("method", trainer.algorithm.method, "forward"),
            ("guard", trainer.guard, "watch"),
            ("backward", trainer.algorithm.engine, "backward"),
            ("optimizer", trainer.algorithm.engine, "step"),
            ("ema", trainer.algorithm.average, "follow"),
            ("meter", trainer.meter, "add"),
        ):
            self.wrap(part, owner, name)

    def wrap(self, part: str, owner: Any, name: str) -> None:
        run: Callable[..., Any] = getattr(owner, name)

        def timed(*arguments: Any, **named: Any) -> Any:
            before, self.current = self.current, part
            started = self.now()
            result = run(*arguments, **named)
            # Confident strong views ask the method inside `forward`: parts may nest.
            self.seconds[part] += self.now() - started
            self.current = before
            return result

        # Callables that their owners hold as attributes; an instance's own come first.
        vars(owner)[name] = timed

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            return time.perf_counter()
        return time.thread_time()


class Operators(TorchDispatchMode):
    """Counts dispatcher calls and value reads by the part in which they happen."""

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        self.parts = parts
        self.calls: Counter[str] = Counter()
        self.reads: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):  # type: ignore[no-untyped-def]
        self.calls[self.parts.current] += 1
        if function.overloadpacket.__name__ in READS:
            self.reads[self.parts.current] += 1
        return function(*args, **(kwargs or {}))


def profile(trainer: Trainer, steps: int) -> list[dict[str, Any]]:
    """One row per part, then their sums: milliseconds (median over steps), operators, reads."""
    parts = Parts(trainer)
    samples: list[dict[str, float]] = []
    for i in range(WARM_UP + steps):
        parts.seconds.clear()
        started = parts.now()
        trainer.train_step()
        total = parts.now() - started
        if i >= WARM_UP:
            other = total - sum(parts.seconds.values())
            samples.append({**parts.seconds, "other": other, "step": total})
    with Operators(parts) as operators:
        trainer.train_step()
    rows = []
    for part in (*PARTS, "other"):
        rows.append(
            {
                "part": part,
                "ms": 1e3 * statistics.median(s[part] for s in samples),
                "operators": operators.calls[part],
                "reads": operators.reads[part],
            }
        )
    outside = [r for r in rows if r["part"] not in ("data", "forward", "backward")]
    for name, chosen in (("overhead", outside), ("step", rows[:])):
        sums = {key: sum(r[key] for r in chosen) for key in ("ms", "operators", "reads")}
        rows.append({"part": name, **sums})
    for row in rows:
        row["share"] = round(row["ms"] / rows[-1]["ms"], 4)
        row["ms"] = round(row["ms"], 3)
    return rows


def top_operators(trainer: Trainer, number: int) -> str:
    """Table of the operators with the largest own time."""
    cuda = trainer.setup.ranks.device.type == "cuda"
    with torch.profiler.profile() as profiler:
        for _ in range(2):
            trainer.train_step()
    order = "self_cuda_time_total" if cuda else "self_cpu_time_total"
    table: str = profiler.key_averages().table(sort_by=order, row_limit=number)
    return table


def by_kind(trainer: Trainer, steps: int) -> list[dict[str, Any]]:
    """Milliseconds and launches of a step by kind, the largest first."""
    with torch.profiler.profile() as profiler:
        for _ in range(steps):
            trainer.train_step()
        if trainer.setup.ranks.device.type == "cuda":
            torch.cuda.synchronize()
    on_device = trainer.setup.ranks.device.type == "cuda"
    found: dict[str, list[float]] = {kind: [0.0, 0] for kind in (*KINDS, "other")}
    for event in profiler.key_averages():
        is_kernel = event.device_type == torch.autograd.DeviceType.CUDA
        # On a device a range such as Optimizer.step spans kernels that are events of their own.
        if is_kernel != on_device or (on_device and event.is_user_annotation):
            continue
        fits = (kind for kind, names in KINDS.items() if re.search(names, event.key, re.IGNORECASE))
        sums = found[next(fits, "other")]
        sums[0] += event.self_device_time_total if on_device else event.self_cpu_time_total
        sums[1] += event.count
    total = sum(us for us, _ in found.values())
    rows = [
        {"part": f"kind: {kind}", "ms": round(us / 1e3 / steps, 3), "operators": round(n / steps)}
        | {"reads": 0, "share": round(us / total, 4)}
        for kind, (us, n) in found.items()
    ]
    return sorted(rows, key=lambda row: -row["ms"])


def main() -> int:
    parser = argparse.ArgumentParser(description="Parts of a training step.")
    parser.add_argument("--config", default="fashion_mnist_lt/reversed")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--top", type=int, default=0, help="operators to name")
    parser.add_argument("--kinds", action="store_true", help="time by kind of kernel or operator")
    parser.add_argument("--label", default="", help="what is measured, for the CSV")
    parser.add_argument("--output", type=Path, help="CSV file to add the rows to")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value")
    options = parser.parse_args()
    settings = ["log.progress=off", "train.threads=1", *options.overrides]
    config = load_config(options.config, settings)
    check_launch(config)
    trainer = Trainer(config, start_ranks(config), make_loader=SyntheticLoader, write=False)
    facts = {
        "label": options.label,
        "config": config.name,
        "overrides": " ".join(options.overrides),
        "model": config.model.name,
        "views": trainer.setup.views_per_step,
        "engine": config.distributed.engine,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "commit": git_commit(),
        "machine": machine_name(),
    }
    if options.top:
        print(top_operators(trainer, options.top))
    kinds = []
    if options.kinds:
        for _ in range(WARM_UP):
            trainer.train_step()
        kinds = by_kind(trainer, options.steps)
    rows = profile(trainer, options.steps)
    rows += kinds
    trainer.close()
    stop_ranks()
    print(f"{config.name}, {facts['views']} views per step, {facts['machine']}")
    print(f"{'':28}{'ms':>10}{'share':>9}{'operators':>11}{'reads':>7}")
    for row in rows:
        print(
            f"{row['part']:28}{row['ms']:>10.2f}{row['share']:>9.1%}"
            f"{row['operators']:>11}{row['reads']:>7}"
        )
    if options.output:
        new = not options.output.exists()
        with options.output.open("a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, [*facts, *rows[0]])
            if new:
                writer.writeheader()
            writer.writerows({**facts, **row} for row in rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
