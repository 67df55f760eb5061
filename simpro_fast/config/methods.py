"""The keys of each training method, and which method a name means.

`MethodConfig` has the keys that every method takes; a method's own are the fields of its subclass,
so that an option of another method is an unknown key. Torch is not imported here: the classes that
train are named by their import path and looked up when they are built.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, Strict, field_validator, model_validator

from simpro_fast.config.section import NOTHING, ROUNDING, FilePath, Section
from simpro_fast.utils.dotted_path import import_function, is_dotted
from simpro_fast.utils.errors import ConfigError


class MethodConfig(Section):
    """Keys of every method."""

    labeled_views: ClassVar[int] = 2
    """L where `data.labeled_views` does not say; 2 is weak and strong, as SimPro trains."""
    strong_views: ClassVar[int] = 2
    """V where `data.strong_views` does not say."""
    paper_views: ClassVar[tuple[int, int] | None] = None
    """(L, V) of `variant=paper` where they are others."""
    alpha_by_sizes: ClassVar[bool] = False
    """Whether `alpha=auto` follows from the sizes of the sets; else it is 1."""

    name: str
    """A method of docs/methods.md, or the dotted path of a class of one's own."""
    variant: Literal["released", "paper"] = "released"
    """`released` follows the published code, `paper` the paper, where they differ; each method says
    how. Of SimPro: views, floors, alpha and the normaliser of pi_u; where its equations and its
    Algorithm 1 differ, `paper` keeps the algorithm: pseudo-labels have tau (the equation has none),
    and only images above the threshold count for pi_u (the equation averages all of them)."""
    threshold: float = Field(0.95, ge=0, le=100)
    """A weak view whose largest probability is below it is masked; above 1 masks everything."""
    momentum: float = Field(0.9, ge=0, lt=1)
    """Moving average of pi_u and phi, applied once per period; every method tracks both."""
    alpha: Literal["auto"] | float = "auto"
    """Weight of the labeled loss; `auto`: 1, and in SimPro derived from the set sizes."""
    alpha_max: float | None = Field(None, gt=0)
    """Upper bound of `alpha`; short runs on small unlabeled sets need 1."""
    impl: Literal["auto", "triton", "eager", "compile"] = Field("auto", **ROUNDING)
    """Losses: `auto` takes a Triton kernel for the unlabeled one on CUDA and eager PyTorch for the
    rest; `compile` is eager PyTorch through torch.compile."""

    @model_validator(mode="after")
    def _check_alpha(self) -> MethodConfig:
        if not isinstance(self.alpha, str) and self.alpha <= 0:
            raise ValueError(f"alpha must be positive or 'auto', got {self.alpha}")
        return self

    @property
    def views(self) -> tuple[int, int]:
        """(L, V) that the method asks for."""
        if self.variant == "paper" and self.paper_views is not None:
            return self.paper_views
        return self.labeled_views, self.strong_views

    @classmethod
    def own_keys(cls) -> list[str]:
        """The keys that other methods do not have, or not in this sense."""
        return [key for key in cls.model_fields if key not in MethodConfig.model_fields]


class PriorConfig(MethodConfig):
    """A method that follows an estimate of the unlabeled class distribution."""

    prior: FilePath | Annotated[tuple[float, ...], Strict(False)] | None = Field(None, **NOTHING)
    """Class shares of the unlabeled images, taken as given from the first step on in place of the
    method's estimate: numbers to any scale, or a file: JSON {class: share}, CSV class,share, the
    shares.json of `simpro-fast shares`, or the summary.json of another run."""

    @field_validator("prior")
    @classmethod
    def _check_prior(cls, prior: Any) -> Any:
        if isinstance(prior, tuple) and not (min(prior, default=0) >= 0 and sum(prior) > 0):
            raise ValueError(f"shares must be from 0 on, and one above 0; got {list(prior)}")
        return prior


class SimProConfig(PriorConfig):
    """SimPro (ICML 2024), Algorithm 1."""

    paper_views = (1, 1)
    alpha_by_sizes = True
    name: str = "simpro"
    tau: float = Field(2.0, ge=0, le=100)
    """Strength of both logit adjustments."""
    hard: bool = False
    """One-hot pseudo-labels."""
    adjust_pseudo_labels: bool = True
    """Ablation: false removes tau * log pi_u from the pseudo-labels (no E step)."""
    adjust_loss: bool = True
    """Ablation: false removes tau * log phi from both losses (no M step)."""
    phi_counts: Literal["drawn", "loss"] = "drawn"
    """Count of a labeled image in phi where a kept unlabeled one counts 1: `drawn` 1, as
    published; `loss` alpha * mu, its weight in the loss."""
    prior_rows: Literal["kept", "all"] = "kept"
    """Which images move pi_u: those above the threshold, as published, or `all`, which makes the
    update a step of Saerens' EM."""


class FixMatchConfig(MethodConfig):
    """FixMatch (NeurIPS 2020), the baseline without class priors."""

    paper_views = (1, 1)
    name: str = "fixmatch"
    hard: bool = True
    """False trains on the soft pseudo-labels."""


class SimProStarConfig(SimProConfig):
    """SimPro with the nearest of three class distributions in place of its estimate."""

    name: str = "simpro_star"
    anchor_after: int = Field(5, ge=0, le=10**6)
    """Periods after which pi_u becomes the nearest anchor."""


class ACRConfig(PriorConfig):
    """ACR (CVPR 2023)."""

    name: str = "acr"
    variant: Literal["released", "paper"] = "paper"
    tau: float = Field(2.0, ge=0, le=100)
    """Largest adjustment of head A's pseudo-labels (tau1)."""
    tau_balanced: float = Field(2.0, ge=0, le=100)
    """Adjustment of head B's pseudo-labels (tau12)."""
    tau_loss: float = Field(2.0, ge=0, le=100)
    """Adjustment of head B's labeled loss (tau2)."""
    estimate_decay: float = Field(0.99, ge=0, lt=1)
    """Moving average of u, per step."""
    estimate_after: int = Field(5, ge=0, le=10**6)
    """Last period (from 0) before u is estimated and tau_t follows it."""


class ACRNoAnchorsConfig(ACRConfig):
    """ACR whose adjustment never changes."""

    name: str = "acr_no_anchors"


class ABCConfig(MethodConfig):
    """ABC (NeurIPS 2021): an auxiliary balanced classifier. It has no keys of its own."""

    paper_views = (1, 2)
    name: str = "abc"


class CDMADConfig(MethodConfig):
    """CDMAD (CVPR 2024): what the network says of an image without content is its bias."""

    paper_views = (1, 2)
    name: str = "cdmad"
    threshold: float = Field(0.0, ge=0, le=100)
    """Threshold as of every method; CDMAD masks nothing."""
    correct_after: float = Field(0.2, ge=0, le=1)
    """Pseudo-labels are corrected in the periods (from 0) above this share of their number."""
    constant: float = Field(1.0, ge=-10, le=10)
    """Value of the image without content, in every normalised pixel and channel."""


class CPEConfig(MethodConfig):
    """CPE (AAAI 2024): three experts for three class distributions."""

    paper_views = (1, 1)
    name: str = "cpe"
    taus: Annotated[tuple[float, float, float], Strict(False)] = (0.0, 2.0, 4.0)
    """Adjustment of each expert's labeled loss; the second one predicts."""
    cuts: Annotated[tuple[int, int], Strict(False)] | None = None
    """Where, among the classes from the most to the least frequent labeled one, the medium and the
    tail classes begin; None: at 35 and 70 percent of them."""
    mean_over: Literal["images", "terms"] = "images"
    """Divisor of an expert's unlabeled loss: all strong views, as in the other methods, or
    the terms in the sum, as in the published code (each rank and micro-batch by its own)."""

    @field_validator("taus")
    @classmethod
    def _check_taus(cls, taus: tuple[float, float, float]) -> tuple[float, float, float]:
        if not all(0 <= tau <= 100 for tau in taus):
            raise ValueError(f"each must be between 0 and 100, got {list(taus)}")
        return taus

    @field_validator("cuts")
    @classmethod
    def _check_cuts(cls, cuts: tuple[int, int] | None) -> tuple[int, int] | None:
        if cuts is not None and not 0 <= cuts[0] <= cuts[1]:
            raise ValueError(f"must be two ascending numbers of classes, got {list(cuts)}")
        return cuts


class DASOConfig(MethodConfig):
    """DASO (CVPR 2022): pseudo-labels blended with those of the nearest class prototype."""

    paper_views = (1, 1)
    name: str = "daso"
    warmup: int = Field(10, ge=0, le=10**6)
    """Periods of plain FixMatch before; prototypes are collected meanwhile."""
    queue_size: int = Field(256, ge=1, le=10**6)
    """Features kept per class for its prototype; the table is saved in checkpoints."""
    proto_temperature: float = Field(0.05, gt=0, le=100)
    """Temperature of the softmax over cosines to the prototypes."""
    dist_temperature: float = Field(0.3, gt=0, le=100)
    """How the share of semantic pseudo-labels follows the classes' frequency; large: alike."""
    window: int = Field(100, ge=1, le=10**6)
    """Steps whose pseudo-labels give the frequency of classes for the next ones."""
    align_weight: float = Field(1.0, ge=0, le=1000)
    """Weight of the semantic alignment loss."""


class CReSTPlusConfig(MethodConfig):
    """CReST+ (CVPR 2021): generations that take over what the last one is sure of."""

    paper_views = (1, 1)
    name: str = "crest_plus"
    generations: int = Field(5, ge=1, le=1000)
    """Networks trained one after another, each for an equal part of the run."""
    align: bool = True
    """False leaves out distribution alignment, which makes it CReST."""
    align_min: float = Field(0.5, ge=0, le=1)
    """Power of the labeled shares in the last generation's target; 1 in the first one."""
    rate_root: float = Field(3.0, gt=0, le=100)
    """Root of the share of each class that joins the labeled images; large: nearly all of each.
    The published alpha is 1 / rate_root."""
    window: int = Field(128, ge=1, le=10**6)
    """Steps over which the mean prediction is taken."""


class DARPConfig(MethodConfig):
    """DARP (NeurIPS 2020): pseudo-labels refined together towards class counts."""

    paper_views = (1, 2)
    name: str = "darp"
    refine_after: float = Field(0.4, ge=0, le=1)
    """Share of the run's periods that are plain FixMatch."""
    refine_every: int = Field(10, ge=1, le=10**6)
    """Steps between two refinements of all pseudo-labels."""
    rounds: int = Field(10, ge=1, le=10**4)
    """Rounds of alternate scaling of rows and columns (the published T)."""
    keep_factor: float = Field(2.0, gt=0, le=1000)
    """Images of each class that stay, over those it should have (the published alpha)."""
    shares: Annotated[tuple[float, ...], Strict(False)] | Literal["labeled"] | None = None
    """Class shares of the unlabeled images, to any scale; labeled: those of the labeled ones; None:
    estimated by EM when refinement begins."""

    @field_validator("shares")
    @classmethod
    def _check_shares(
        cls, shares: tuple[float, ...] | str | None
    ) -> tuple[float, ...] | str | None:
        if isinstance(shares, tuple) and not all(share > 0 for share in shares):
            raise ValueError(f"each must be above 0, got {list(shares)}")
        return shares


class ADELLOConfig(PriorConfig):
    """ADELLO (ECCV 2024): alignment to a distribution that shifts, and distillation."""

    paper_views = (1, 1)
    name: str = "adello"
    estimate_decay: float = Field(0.999, ge=0, lt=1)
    """Moving average of the estimated unlabeled distribution, per step."""
    power_min: float = Field(0.1, ge=0, le=1)
    """Power of the estimate in the distribution that is trained towards, at the end; 1 at first."""
    distill_after: float = Field(0.2, ge=0, le=1)
    """Share of the run's periods before unsure images are learned from too."""


class CoSSLConfig(MethodConfig):
    """CoSSL (CVPR 2022): a head of its own, trained on enhanced features of rare classes."""

    paper_views = (1, 2)
    name: str = "cossl"
    cotrain_after: float = Field(0.8, ge=0, le=1)
    """Share of the run's periods whose pseudo-labels are plain FixMatch; the head learns too."""
    queue_size: int = Field(256, ge=1, le=10**6)
    """Features kept per class for the head to learn from; the table is saved in checkpoints."""
    mix_min: float = Field(0.6, ge=0, le=1)
    """Least share of a labeled image's own feature where it is mixed with another one."""
    head_lr: float = Field(0.002, gt=0, le=10)
    """Learning rate of the head's Adam, constant."""
    head_weight_decay: float = Field(5e-4, ge=0, le=1)
    """Weight decay of the head, as part of the gradient."""
    head_decay: float = Field(0.999, ge=0, lt=1)
    """Decay of the head's moving average, per step."""


class CPGConfig(MethodConfig):
    """CPG (NeurIPS 2025): images with stable pseudo-labels join the labeled ones."""

    paper_views = (1, 1)
    name: str = "cpg"
    warmup: int = Field(30, ge=0, le=10**6)
    """Periods before images vote."""
    window: int = Field(5, ge=1, le=10**6)
    """Periods of voting before images are accepted anew."""
    vote_share: float = Field(0.07, ge=0, lt=1)
    """An image that votes in more than this share of an image's mean number of draws in a window
    may be accepted."""
    copies: float = Field(10.0, ge=0, le=1000)
    """Noisy features of an image of a class as large as the one at the lower third."""
    noise: float = Field(1.0, ge=0, le=100)
    """Their noise, summed over the classes."""
    smoothing: float = Field(0.1, ge=0, lt=1)
    """Label smoothing of the main head; a vote needs 1 - smoothing of the threshold."""
    mean_over: Literal["images", "terms"] = "images"
    """Divisor of the main head's labeled loss: the expected number of features and noisy copies, or
    that of the batch, as in the published code (each rank and micro-batch by its own)."""


class CCLConfig(MethodConfig):
    """CCL (NeurIPS 2024): contrast of projected features towards continuous pseudo-labels."""

    name: str = "ccl"
    tau: float = Field(2.0, ge=0, le=100)
    """Adjustment of head B's losses; half of it, more than 1, is that of pseudo-labels."""
    energy: float = Field(8.75, ge=-1000, le=1000)
    """Logsumexp of an image's fused logits from which on its pseudo-label is relied on."""
    estimate_after: int = Field(5, ge=0, le=10**6)
    """Last period (from 0) before the estimated distributions move."""
    estimate_decay: float = Field(0.5, ge=0, lt=1)
    """Moving average of the estimated unlabeled distribution, per period."""
    all_decay: float = Field(0.5, ge=0, lt=1)
    """Moving average of that of all images in the unlabeled stream, per period."""
    classify_weight: float = Field(0.7, ge=0, le=1)
    """Weight of the heads' losses; the contrast of reliable images has the rest of 1."""
    smooth_weight: float = Field(1.0, ge=0, le=1000)
    """Weight of the contrast towards smoothed pseudo-labels."""


class UnknownMethodConfig(MethodConfig):
    """The keys of a method that is not imported, as they were read."""

    model_config = ConfigDict(extra="allow")
    variant: Any = "released"
    threshold: Any = 0.95
    momentum: Any = 0.9
    alpha: Any = "auto"
    alpha_max: Any = None
    impl: Any = "auto"

    @model_validator(mode="after")
    def _check_alpha(self) -> UnknownMethodConfig:
        return self  # what its values may be, its own class knows


@dataclass(frozen=True)
class MethodEntry:
    """A method that `method.name` can mean."""

    keys: type[MethodConfig]
    target: str | type
    """Method class, or `module:Class` that is not imported before it is needed."""


METHODS: dict[str, MethodEntry] = {
    "simpro": MethodEntry(SimProConfig, "simpro_fast.methods.simpro:SimPro"),
    "fixmatch": MethodEntry(FixMatchConfig, "simpro_fast.methods.fixmatch:FixMatch"),
    "simpro_star": MethodEntry(SimProStarConfig, "simpro_fast.methods.simpro_star:SimProStar"),
    "acr": MethodEntry(ACRConfig, "simpro_fast.methods.acr:ACR"),
    "acr_no_anchors": MethodEntry(ACRNoAnchorsConfig, "simpro_fast.methods.acr:ACRNoAnchors"),
    "abc": MethodEntry(ABCConfig, "simpro_fast.methods.abc:ABC"),
    "cdmad": MethodEntry(CDMADConfig, "simpro_fast.methods.cdmad:CDMAD"),
    "cpe": MethodEntry(CPEConfig, "simpro_fast.methods.cpe:CPE"),
    "daso": MethodEntry(DASOConfig, "simpro_fast.methods.daso:DASO"),
    "crest_plus": MethodEntry(CReSTPlusConfig, "simpro_fast.methods.crest_plus:CReSTPlus"),
    "darp": MethodEntry(DARPConfig, "simpro_fast.methods.darp:DARP"),
    "adello": MethodEntry(ADELLOConfig, "simpro_fast.methods.adello:ADELLO"),
    "cossl": MethodEntry(CoSSLConfig, "simpro_fast.methods.cossl:CoSSL"),
    "cpg": MethodEntry(CPGConfig, "simpro_fast.methods.cpg:CPG"),
    "ccl": MethodEntry(CCLConfig, "simpro_fast.methods.ccl:CCL"),
}
"""Methods by name, in the order of listing; classes of one's own are added when they are
first named, or by `simpro_fast.methods.register_method`."""

DEFAULT = "simpro"


def method_entry(name: str) -> MethodEntry:
    """Look up `method.name`; a dotted path is imported and remembered.

    Raises:
        ConfigError: no such method, with the nearest name; or the path leads to none.
    """
    if name in METHODS:
        return METHODS[name]
    if not is_dotted(name):
        raise _unknown(name)
    found = import_function("method.name", name, "class")
    entry = entry_of(name, found)
    METHODS[name] = entry
    return entry


def entry_of(name: str, found: Any) -> MethodEntry:
    """The entry of a class that trains, by what it says of itself.

    Raises:
        ConfigError: it is no such class.
    """
    keys = getattr(found, "Config", None)
    if not (isinstance(keys, type) and issubclass(keys, MethodConfig)):
        raise ConfigError(
            f"method.name={name}: it must be a subclass of simpro_fast.methods.Method whose "
            "`Config` is a MethodConfig; docs/methods.md shows one"
        )
    return MethodEntry(keys, found)


def _unknown(name: str) -> ConfigError:
    close = difflib.get_close_matches(name, METHODS, n=1)
    hint = f"; did you mean '{close[0]}'?" if close else ""
    return ConfigError(
        f"method.name={name[:100]!r} is not one of {', '.join(METHODS)}, nor the dotted path of a "
        f"class such as my_package.MyMethod{hint}"
    )


def methods_with(key: str) -> list[str]:
    """Methods that have an option of this name."""
    return [name for name, entry in METHODS.items() if key in entry.keys.own_keys()]
