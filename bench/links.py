"""How long an all-reduce takes, by payload and number of GPUs: published measurements.

Source: S. Bekman, ml-engineering, network/benchmarks/README.md (github.com/stas00/ml-engineering,
read 2026-11): one node of 8 H200 (NCCL 2.30.7; bus bandwidth), and 4 nodes of 8 B200 (algorithm
bandwidth). Between payloads we interpolate; for other numbers of nodes only the latency grows, by
the same amount per doubling that lies between the two measurements (a tree).
"""

from __future__ import annotations

import math

KIB = 1024
GPUS_PER_NODE = 8
PAYLOADS = [32 * KIB * 2**i for i in range(13)]
"""32 KiB to 128 MiB, bytes."""
ONE_NODE_BUS_GBPS = [
    3.15, 6.16, 12.46, 24.68, 48.15, 74.57, 96.26, 145.14, 196.56, 255.90, 301.25, 368.86, 414.54,
]  # fmt: skip
FOUR_NODES_GBPS = [
    0.33, 0.66, 1.21, 2.10, 3.61, 6.44, 10.73, 16.33, 26.12, 37.06, 73.76, 102.07, 134.45,
]  # fmt: skip


def _interpolated(payload: float, seconds: list[float]) -> float:
    """Log-log between the measured payloads; constant below, at the last bandwidth above them."""
    if payload <= PAYLOADS[0]:
        return seconds[0]
    if payload >= PAYLOADS[-1]:
        return seconds[-1] * payload / PAYLOADS[-1]
    above = next(i for i, size in enumerate(PAYLOADS) if size >= payload)
    low, high = PAYLOADS[above - 1], PAYLOADS[above]
    share = math.log(payload / low) / math.log(high / low)
    return math.exp((1 - share) * math.log(seconds[above - 1]) + share * math.log(seconds[above]))


# Bus bandwidth counts 2 (n - 1) / n times the payload.
_ONE_NODE = [
    size * 2 * (GPUS_PER_NODE - 1) / GPUS_PER_NODE / (rate * 1e9)
    for size, rate in zip(PAYLOADS, ONE_NODE_BUS_GBPS, strict=True)
]
_FOUR_NODES = [size / (rate * 1e9) for size, rate in zip(PAYLOADS, FOUR_NODES_GBPS, strict=True)]
LATENCY_PER_DOUBLING = (_FOUR_NODES[0] - _ONE_NODE[0]) / 2
"""Seconds that a small all-reduce takes longer on twice as many nodes."""


def all_reduce_seconds(payload: float, gpus: int) -> float:
    """Seconds of one all-reduce of `payload` bytes over `gpus` GPUs in nodes of 8."""
    if gpus == 1:
        return 0.0
    nodes = gpus / GPUS_PER_NODE
    one, four = _interpolated(payload, _ONE_NODE), _interpolated(payload, _FOUR_NODES)
    if nodes <= 1:
        return one
    doublings = math.log2(nodes)
    if doublings <= 2:
        return one + (four - one) * doublings / 2
    return four + LATENCY_PER_DOUBLING * (doublings - 2)
