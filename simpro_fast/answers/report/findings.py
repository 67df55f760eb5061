"""Findings of a run, in one sentence, and why they may be wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from simpro_fast.answers.estimation.calibration import chance_warning
from simpro_fast.answers.report.runs import kl_of_uniform

FEW_LABELS = 5
"""Labeled images of a class below which its share is hard to estimate."""
_NAMED = 3
_LONGEST = 40


@dataclass(frozen=True)
class Finding:
    """Finding of one run, in plain English."""

    sentence: str
    warnings: tuple[str, ...]
    """Reasons not to trust the estimate."""


def shared_warnings(found: Sequence[Finding | None]) -> list[str]:
    """Warnings that several findings all have, to be said once."""
    known = [one.warnings for one in found if one is not None]
    if len(known) < 2:
        return []
    return [text for text in known[0] if all(text in warnings for warnings in known)]


@dataclass(frozen=True)
class Interval:
    """Estimated share of one class in the unlabeled set, with its bounds."""

    estimate: float
    low: float
    high: float


def intervals(summary: dict[str, Any]) -> list[Interval] | None:
    """Read every interval from `shares` of a summary; None without, or if its rows do not fit.

    A row names its class, or gives its number.
    """
    shares = summary.get("shares")
    rows = shares.get("rows") if isinstance(shares, dict) else None
    names = summary["class_names"]
    if not rows or len(rows) != len(names):
        return None
    found = []
    for k, row in enumerate(rows):
        values = [row.get(key) for key in ("estimate", "low", "high")]
        if row.get("class") not in (k, names[k]) or None in values:
            return None
        found.append(Interval(*map(float, values)))
    return found


def finding(summary: dict[str, Any]) -> Finding | None:
    """The sentence and the warnings; None before a run has estimated anything.

    Args:
        summary: the content of `summary.json`; its `shares` has the estimate with intervals,
            without it `pi_u` of the training is a bare estimate.
    """
    pi_u = summary.get("pi_u")
    if not pi_u:
        return None
    bounds = intervals(summary)
    shares = [i.estimate for i in bounds] if bounds else pi_u
    return Finding(_sentence(summary, shares, bounds), tuple(_warnings(summary, bounds)))


def _sentence(
    summary: dict[str, Any], shares: Sequence[float], bounds: Sequence[Interval] | None
) -> str:
    order = sorted(range(len(shares)), key=lambda k: -shares[k])
    # Frequent is what has more than an even share, and an interval has to show it.
    at_least = shares if bounds is None else [bound.low for bound in bounds]
    frequent = [k for k in order if at_least[k] > 1 / len(shares)]
    top = frequent[:_NAMED]
    truth = summary.get("pi_u_true")
    even = shares[order[0]] < 1.5 / len(shares)
    wide = bounds is not None and max(bound.high for bound in bounds) > 2 / len(shares)
    if (even and wide) or not (even or frequent):
        return (
            "The shares of the classes cannot be told apart yet: their intervals are too wide. "
            "More test images of every class narrow these, and so does a better network."
        )
    if even:
        top = order[:1]
        said = "the unlabeled images are spread over all classes, none far above the others"
        if bounds is None:
            said = "by pi_u, whose error is unknown, " + said
        said += (
            f"; the most frequent is {_class(summary, top[0])} ({_share(top[0], shares, bounds)})"
        )
    else:
        named = [f"{_class(summary, k)} ({_share(k, shares, bounds)})" for k in top]
        most = sum(shares[k] for k in top) >= 0.5
        said = f"the unlabeled images are {'mostly' if most else 'most often'} {_and(named)}"
    if truth:
        one = "" if len(top) == 1 else "these have "
        said += f"; in truth {one}{_and([_percent(truth[k]) for k in top])}"
    return f"{said[0].upper()}{said[1:]}."


def _warnings(summary: dict[str, Any], bounds: Sequence[Interval] | None) -> list[str]:
    found = []
    if (chance := chance_warning(summary.get("confusion"))) is not None:
        found.append(chance)
    if bounds is None:
        found.append(
            "the estimate has no intervals: pi_u is a by-product of training, its error unknown"
        )
    elif summary["shares"].get("converged") is False:
        found.append("the sampling behind the intervals has not converged")
    elif summary["shares"].get("consistent") is False:
        found.append("the predicted classes contradict the test images: the intervals do not hold")
    labeled = summary.get("labeled_counts")
    few = [k for k, count in enumerate(labeled or ()) if count < FEW_LABELS]
    if few:
        more = f" and {len(few) - _NAMED} more" if len(few) > _NAMED else ""
        found.append(
            f"{_and([_class(summary, k) for k in few[:_NAMED]])}{more}: fewer than {FEW_LABELS} "
            "labeled images, too few to tell the class from others reliably"
        )
    kl, truth = summary.get("kl_pi_u"), summary.get("pi_u_true")
    if kl is not None and truth:
        guess = kl_of_uniform(truth)
        if kl >= guess:
            found.append(
                f"the truth is known here, and a uniform guess is closer to it (KL {guess:.3f}) "
                f"than pi_u (KL {kl:.3f} nats)"
            )
    return found


def _class(summary: dict[str, Any], k: int) -> str:
    name = str(summary["class_names"][k])
    return f"class {name if len(name) <= _LONGEST else f'{name[: _LONGEST - 2]}..'}"


def _share(k: int, shares: Sequence[float], bounds: Sequence[Interval] | None) -> str:
    if bounds is None:
        return _percent(shares[k])
    return f"{_percent(shares[k])}, {100 * bounds[k].low:.0f} to {100 * bounds[k].high:.0f}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.0095 else f"{100 * share:.1g} %"


def _and(parts: Sequence[str]) -> str:
    *head, tail = parts
    return f"{', '.join(head)} and {tail}" if head else tail
