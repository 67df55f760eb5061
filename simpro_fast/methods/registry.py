"""Methods from the configuration."""

from __future__ import annotations

import importlib

from simpro_fast.config.methods import METHODS, MethodConfig, entry_of, method_entry
from simpro_fast.config.schema import Config
from simpro_fast.methods.base import Method
from simpro_fast.methods.needs import Setting
from simpro_fast.utils.errors import ConfigError


def resolve_alpha(
    method: MethodConfig,
    num_labeled: int,
    num_unlabeled: int,
    batch_size: int,
    mu: int,
) -> float:
    """The weight of the labeled loss, from the sizes of the whole sets and the global batch.

    `auto` is for SimPro the number of labeled batches over that of unlabeled ones: with variant
    "released" floor(N / B) / floor(M / (mu B)), each at least 1; with "paper" mu N / M. Other
    methods weigh both losses alike, so there it is 1. `alpha_max` caps the result, a given number
    too.

    Args:
        method: alpha, alpha_max, variant.
        num_labeled, num_unlabeled: images in the sets (N, M).
        batch_size: labeled images per step over all ranks (B).
        mu: unlabeled images per labeled one.

    Raises:
        ConfigError: an empty set where `auto` needs its size.
    """
    if not isinstance(method.alpha, str):
        alpha = method.alpha
    elif not method.alpha_by_sizes:
        alpha = 1.0
    elif num_labeled < 1 or num_unlabeled < 1:
        raise ConfigError(
            f"method.alpha=auto needs images in both sets, got {num_labeled} labeled and "
            f"{num_unlabeled} unlabeled; set method.alpha to a number"
        )
    elif method.variant == "released":
        labeled_batches = max(1, num_labeled // batch_size)
        alpha = labeled_batches / max(1, num_unlabeled // (mu * batch_size))
    else:
        alpha = mu * num_labeled / num_unlabeled
    return alpha if method.alpha_max is None else min(alpha, method.alpha_max)


def method_class(config: MethodConfig) -> type[Method]:
    """The class that `method.name` means.

    Raises:
        ConfigError: what a dotted path leads to is no `Method`.
    """
    found = method_entry(config.name).target
    if isinstance(found, str):
        module, _, name = found.partition(":")
        found = getattr(importlib.import_module(module), name)
    if not (isinstance(found, type) and issubclass(found, Method)):
        raise ConfigError(
            f"method.name={config.name}: it must be a subclass of simpro_fast.methods.Method; "
            "docs/methods.md shows one"
        )
    return found


def setting_of(
    config: Config,
    *,
    labeled_counts: tuple[int, ...],
    num_unlabeled: int,
    features: int,
    image_size: int,
    alpha: float,
    prior: tuple[float, ...] | None = None,
) -> Setting:
    """Collect what the method of a run is built from; arguments as in `Setting`."""
    return Setting(
        labeled_counts=labeled_counts,
        num_unlabeled=num_unlabeled,
        strong_views=config.strong_views,
        labeled_views=config.labeled_views,
        alpha=alpha,
        features=features,
        batch_size=config.data.batch_size,
        mu=config.data.mu,
        period=config.train.period,
        periods=config.train.steps // config.train.period,
        image_size=image_size,
        prior=prior,
    )


def build_method(config: MethodConfig, setting: Setting) -> Method:
    """The method `method.name` on the CPU; move it to the logits' device."""
    return method_class(config).build(config, setting)


def register_method(name: str, method: type[Method]) -> None:
    """Let `method.name=NAME` mean this class, in this process.

    A class that can be imported needs no registration: its dotted path is a name.

    Raises:
        ConfigError: the name is taken, or the class has no `Config`.
    """
    if name in METHODS:
        raise ConfigError(f"there is a method {name!r} already; take another name")
    METHODS[name] = entry_of(name, method)
