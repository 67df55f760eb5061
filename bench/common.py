"""What the kernel benches share: a correctness gate, timing, memory, launches, CSV rows.

Timing: after a warm-up, each repetition is timed on its own (CUDA events on a device, the
monotonic clock on the CPU) and p20, p50 and p80 are reported. On a device a buffer larger than the
L2 cache is overwritten before each repetition, so that inputs come from memory.
"""

import argparse
import csv
import importlib.util
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from simpro_fast.utils.machine import processor_name
from simpro_fast.utils.provenance import git_commit

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(os.environ.get("BENCH_RESULTS") or Path(__file__).parent / "results")
# The part of the kernel tests that decides whether numbers are worth reporting.
GATE_TESTS = (
    "tests/kernels_ops/test_determinism.py",
    "tests/kernels_ops/test_special_values.py",
    "tests/kernels_ops/test_{op}.py",
)
GATE_SECONDS = 60
L2_FLUSH_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Row:
    """One line of a result file; times in milliseconds, memory in MiB, bandwidth in GB/s."""

    bench: str
    provider: str
    mode: str
    """"forward" (no gradient wanted) or "forward+backward"."""
    rows: int
    classes: int
    views: int
    dtype: str
    mask_rate: float
    p20_ms: float
    p50_ms: float
    p80_ms: float
    least_bytes: int
    """What the fused kernel must move: logits read once, one gradient written."""
    gbps: float
    """least_bytes / p50: the same bytes for every provider, so it ranks them."""
    copy_fraction: float
    """gbps over the measured copy bandwidth of this machine."""
    peak_mib: float | None
    launches: int | None
    device_ms: float | None
    """Of these launches on the device; what p50 has beyond it, the host was too slow for."""


def machine() -> dict[str, str]:
    """Where a number was measured: device, versions, commit ("+" where files differ from it)."""
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    else:
        device = f"{processor_name()}, {torch.get_num_threads()} threads of {os.cpu_count()} cores"
    return {
        "machine": device,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "commit": git_commit() or "unknown",
        "load": f"{os.getloadavg()[0]:.1f}",
        "date": time.strftime("%Y-%m-%d"),
    }


def _version(package: str) -> str:
    if importlib.util.find_spec(package) is None:
        return "none"
    return str(importlib.import_module(package).__version__)


def gate(op: str, options: argparse.Namespace) -> None:
    """Run part of the kernel tests; exits 1, reporting nothing, where one fails."""
    if options.no_gate:
        return
    tests = [name.format(op=op) for name in GATE_TESTS]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    if options.smoke:
        command += ["-k", "bit_equal or module_is_the_function or mean_counts"]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    print(f"gate: {' '.join(tests)}", flush=True)
    started = time.monotonic()
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=GATE_SECONDS)
    except subprocess.TimeoutExpired:
        # Slow is not wrong: with -x, no test has failed so far.
        process.kill()
        process.communicate()
        print(f"gate: no failure in {GATE_SECONDS} s", flush=True)
        return
    if process.returncode:
        sys.exit(f"{output[-4000:]}\ngate: kernel tests fail, nothing is reported")
    print(f"gate: green after {time.monotonic() - started:.0f} s", flush=True)


def quantiles(function: Callable[[], Any], device: torch.device, seconds: float) -> list[float]:
    """p20, p50, p80 of the run time in ms: as many repetitions as fit, at least 10."""
    for _ in range(3):
        function()
    measure = _time_on_device if device.type == "cuda" else _time_on_cpu
    times = measure(function, seconds)
    ordered = torch.tensor(times, dtype=torch.float64)
    return [float(ordered.quantile(q)) for q in (0.2, 0.5, 0.8)]


def _time_on_cpu(function: Callable[[], Any], seconds: float) -> list[float]:
    times: list[float] = []
    deadline = time.perf_counter() + seconds
    while len(times) < 10 or (time.perf_counter() < deadline and len(times) < 1000):
        started = time.perf_counter()
        function()
        times.append((time.perf_counter() - started) * 1e3)
    return times


def _time_on_device(function: Callable[[], Any], seconds: float) -> list[float]:
    flush = torch.empty(L2_FLUSH_BYTES, dtype=torch.int8, device="cuda")
    pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    torch.cuda.synchronize()
    deadline = time.perf_counter() + seconds
    while len(pairs) < 10 or (time.perf_counter() < deadline and len(pairs) < 1000):
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        flush.zero_()
        start.record()
        function()
        end.record()
        pairs.append((start, end))
        if len(pairs) % 50 == 0:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in pairs]


def copy_gbps(device: torch.device) -> float:
    """Read plus write bandwidth of a large device-to-device copy, GB/s."""
    size = 2**30 if device.type == "cuda" else 2**26
    source = torch.zeros(size, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    _, p50, _ = quantiles(lambda: target.copy_(source), device, seconds=1.0)
    return 2 * size / p50 / 1e6


def peak_mib(function: Callable[[], Any], device: torch.device) -> float | None:
    """Memory above what is allocated before the call; None on the CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def on_device(
    function: Callable[[], Any], device: torch.device
) -> tuple[int, float] | tuple[None, None]:
    """Kernels, copies and fills that one call puts on the device, their time in ms; None on CPU."""
    if device.type != "cuda":
        return None, None
    torch.empty(L2_FLUSH_BYTES, dtype=torch.int8, device="cuda").zero_()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        function()
        torch.cuda.synchronize()
    events = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return len(events), sum(e.time_range.elapsed_us() for e in events) / 1e3


@dataclass(frozen=True)
class Measurement:
    """How a call performs, whatever it computes; see the fields of `Row`."""

    p20_ms: float
    p50_ms: float
    p80_ms: float
    least_bytes: int
    gbps: float
    copy_fraction: float
    peak_mib: float | None
    launches: int | None
    device_ms: float | None


def measure(
    run: Callable[[], Any], device: torch.device, *, seconds: float, least_bytes: int, copy: float
) -> Measurement:
    p20, p50, p80 = quantiles(run, device, seconds)
    gbps = least_bytes / p50 / 1e6
    launches, device_ms = on_device(run, device)
    return Measurement(
        p20_ms=round(p20, 4),
        p50_ms=round(p50, 4),
        p80_ms=round(p80, 4),
        least_bytes=least_bytes,
        gbps=round(gbps, 2),
        copy_fraction=round(gbps / copy, 4),
        peak_mib=peak_mib(run, device),
        launches=launches,
        device_ms=None if device_ms is None else round(device_ms, 4),
    )


def arguments_of(
    description: str | None, arguments: list[str] | None, *, gated: bool = True
) -> argparse.Namespace:
    """--smoke and --seconds, of a `gated` bench --shape and --no-gate; the device.

    One thread on the CPU.
    """
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="one small shape, nothing written")
    parser.add_argument("--seconds", type=float, default=1.0, help="per measurement (default 1)")
    if gated:
        parser.add_argument("--shape", type=shapes_of, help="only these, as 65536x1000,512x10")
        parser.add_argument("--no-gate", action="store_true", help="the kernel tests have passed")
    options = parser.parse_args(arguments)
    if options.smoke:
        options.seconds = 0.1
    options.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # Threads that wait for each other on a shared machine measure the neighbours.
    torch.set_num_threads(1)
    return options


def shapes_of(text: str) -> list[tuple[int, ...]]:
    """An argparse type: "65536x1000,512x10"."""
    return [tuple(map(int, shape.split("x"))) for shape in text.split(",")]


def names_of(known: Iterable[str]) -> Callable[[str], list[str]]:
    """An argparse type: names with commas between them, each one of `known`.

    Overrides may follow, which `nargs` would swallow.
    """
    valid = list(known)

    def parse(text: str) -> list[str]:
        names = text.split(",")
        for name in names:
            if name not in valid:
                raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(valid)}")
        return names

    return parse


def fresh_compilation() -> None:
    """Forget compiled code, so that torch.compile sees each shape as the only one."""
    torch.compiler.reset()


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Replace the rows of this machine (by name) in a result file, keep those of others."""
    write_table(path, [asdict(row) for row in rows], replace=())


def write_table(path: Path, rows: Sequence[dict[str, Any]], *, replace: Sequence[str]) -> None:
    """Add rows with this machine's line to a result file.

    A row of this machine that is already there is replaced where it agrees with a new one in all
    columns of `replace`; rows of other machines stay.
    """
    here = machine()
    fresh = [{**row, **here} for row in rows]
    fields = list(fresh[0])

    def key(row: dict[str, Any]) -> tuple[str, ...]:
        return tuple(str(row.get(name)) for name in (*replace, "machine"))

    new = {key(row) for row in fresh}
    kept: list[dict[str, Any]] = []
    if path.exists():
        with path.open(newline="", encoding="utf-8") as file:
            kept = [row for row in csv.DictReader(file) if key(row) not in new]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fields, extrasaction="ignore")
        writer.writeheader()
        writer.writerows([*kept, *fresh])


def save_bars(
    path: Path, labels: Sequence[str], series: dict[str, Sequence[float]], *, title: str
) -> None:
    """One group of horizontal bars per label, with the values written at their ends."""
    if importlib.util.find_spec("matplotlib") is None:
        print(f"{path.name} not drawn: pip install -e '.[report]'")
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 1.2 + 0.45 * len(labels) * len(series)), layout="constrained")
    axis = figure.subplots()
    height = 0.8 / len(series)
    for index, (name, values) in enumerate(series.items()):
        places = [i + index * height for i in range(len(labels))]
        bars = axis.barh(places, values, height * 0.9, label=name)
        axis.bar_label(bars, fmt="%.3g", padding=3)
    axis.set_yticks([i + 0.4 - height / 2 for i in range(len(labels))], labels)
    axis.invert_yaxis()
    axis.margins(x=0.12)
    if len(series) == 1:
        axis.set_xlabel(next(iter(series)))
    else:
        axis.legend(frameon=False)
    axis.set_title(title, fontsize=10)
    figure.savefig(path, dpi=110)


def save_figure(path: Path, rows: Sequence[Row]) -> None:
    """p50 with p20 to p80 of every provider, one panel per mode and dtype; needs [report]."""
    if importlib.util.find_spec("matplotlib") is None:
        print(f"{path.name} not drawn: pip install -e '.[report]'")
        return
    from matplotlib.figure import Figure

    panels = sorted({(row.mode, row.dtype) for row in rows})
    providers = list(dict.fromkeys(row.provider for row in rows))
    shapes = list(dict.fromkeys((row.rows, row.classes) for row in rows))
    figure = Figure(figsize=(4.5 * len(panels), 4), layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    width = 0.8 / len(providers)
    for axis, (mode, dtype) in zip(axes, panels, strict=True):
        for index, provider in enumerate(providers):
            shown = [r for r in rows if (r.mode, r.dtype, r.provider) == (mode, dtype, provider)]
            places = [shapes.index((r.rows, r.classes)) + index * width for r in shown]
            middle = [r.p50_ms for r in shown]
            spread = [
                [r.p50_ms - r.p20_ms for r in shown],
                [r.p80_ms - r.p50_ms for r in shown],
            ]
            axis.bar(places, middle, width, yerr=spread, label=provider)
        labels = [f"{rows_} x {classes}" for rows_, classes in shapes]
        middle_bar = 0.4 - width / 2
        axis.set_xticks([i + middle_bar for i in range(len(shapes))], labels, rotation=20)
        axis.set_yscale("log")
        axis.set_title(f"{mode}, {dtype}")
    axes[0].set_ylabel("time of a call, ms (p50; bars p20 to p80)")
    axes[0].legend(frameon=False)
    here = machine()
    figure.suptitle(f"{rows[0].bench}: {here['machine']}, torch {here['torch']}", fontsize=10)
    figure.savefig(path, dpi=110)


def report(rows: list[Row], row: Row) -> None:
    """Append and print a row, with the speed relative to the eager one of the same shape."""
    if not rows:
        print(
            f"{'mode':17} {'shape':>13} {'dtype':5} {'provider':9} {'p20':>9} {'p50':>9} {'p80':>9}"
            f" ms {'GB/s':>7} {'of copy':>8} {'speed':>6} {'launches':>8} {'device':>9} ms"
        )
    rows.append(row)

    def shown(r: Row) -> tuple[Any, ...]:
        return r.mode, r.rows, r.classes, r.dtype

    eager = [r.p50_ms for r in rows if r.provider == "eager" and shown(r) == shown(row)]
    speed = f"{eager[-1] / row.p50_ms:.1f}x" if eager else "-"
    launches = row.launches if row.launches is not None else "-"
    device = f"{row.device_ms:.3f}" if row.device_ms is not None else "-"
    print(
        f"{row.mode:17} {f'{row.rows}x{row.classes}':>13} {row.dtype:5} {row.provider:9} "
        f"{row.p20_ms:9.3f} {row.p50_ms:9.3f} {row.p80_ms:9.3f}    {row.gbps:7.1f} "
        f"{row.copy_fraction:8.1%} {speed:>6} {launches:>8} {device:>9}",
        flush=True,
    )
