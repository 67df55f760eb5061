"""The section `data`: data set, split, batches, views and own files."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, Strict, model_validator

from simpro_fast.config.section import NOTHING, ROUNDING, FilePath, FilePaths, Section

Range = Annotated[tuple[float, float], Strict(False)]
Statistics = Annotated[tuple[float, float, float], Strict(False)]
Fit = Literal["crop", "pad", "squash"]
Interpolation = Literal["bilinear", "bicubic"]
Distribution = Literal["consistent", "uniform", "reversed", "middle", "head_tail", "random"]


class DataConfig(Section):
    """Data set, split, batches and views."""

    name: str = "digits"
    """One of the known data sets, `images` (your own files), or a loader of your own:
    package.module.function (docs/own_code.md)."""
    root: FilePath | None = Field(None, **NOTHING)
    """Folder of the data set's files; None: the set's well-known places."""
    cache_dir: FilePath | None = Field(None, **NOTHING)
    """Folder for copies that are made once (STL-10, small ImageNet); None: beside the files."""
    image_size: int | None = Field(None, gt=0, le=4096)
    """Side in pixels; None: the set's own."""
    fit: Fit = "crop"
    """How a picture becomes a square. crop: its largest centred square; pad: all of it, centred
    between bars of the colour that normalises to 0, `mean` rounded to whole values of 0 .. 255;
    squash: all of it, stretched. Pictures of one size that are squares already stay as they are."""
    interpolation: Interpolation | None = None
    """Antialiased filter that scales pictures; None: what `model.weights` expect where that is
    known and one of the two (timm's networks), else bilinear."""
    mean: Statistics | None = None
    """Of each channel, on the scale 0 .. 1; goes with `std`."""
    std: Statistics | None = None
    """Of each channel, on the scale 0 .. 1; both or none. None: what `model.weights` expect where
    that is known (timm's networks), else the set's own."""
    labeled_max: int = Field(500, gt=0)
    """Labeled images of the most frequent class (N1)."""
    unlabeled_max: int = Field(4000, gt=0)
    """Unlabeled images of the most frequent class (M1); like `gamma_unlabeled` and
    `unlabeled_distribution` not used by sets that have an unlabeled part of their own (STL-10)."""
    gamma_labeled: float = Field(100.0, ge=1)
    """Imbalance ratio of the labeled set, largest over smallest class."""
    gamma_unlabeled: float | None = Field(None, ge=1)
    """Imbalance ratio of the unlabeled set; None: the same as `gamma_labeled`."""
    unlabeled_distribution: Distribution = "consistent"
    """Order of the classes in the unlabeled set, from many images to few: as in the labeled set,
    equal numbers, reversed, most in the middle, most at both ends, or drawn by the seed."""
    labeled_fraction: float | None = Field(None, gt=0, lt=1)
    """Share of every class that is labeled, the rest is unlabeled (ImageNet); instead of
    `labeled_max` and `unlabeled_max`."""
    classes: int | None = Field(None, gt=1, le=100_000)
    """Classes of `name: synthetic` (made-up images for benches and machine checks); None: 10."""
    total_max: int | None = Field(None, gt=0)
    """With `labeled_fraction`: cut the classes to a long tail of ratio `gamma_labeled` first, this
    many images of the most frequent one; None: all images."""
    class_list: FilePath | None = Field(None, **NOTHING)
    """ImageNet: the order of the 1000 classes in the downsampled files (JSON rows [wnid, name], or
    map_clsloc.txt); None: the shipped one."""
    test_per_class: int | None = Field(None, gt=0)
    """Test images per class: held out of a set that has no test part (digits); of other sets at
    most as many are tested, the same for every seed. None: the whole test part."""
    split_seed: int | None = Field(None, ge=0, lt=2**63)
    """Draws anew which images of each class are labeled, unlabeled and held out, whatever `seed`;
    None: the published rule, the first ones of each class in the order of the data set."""
    split_file: FilePath | None = Field(None, **NOTHING)
    """A `split.npz` with the index lists `labeled`, `unlabeled`, `test` to use as they are."""
    overlap: bool = False
    """Put the labeled images into the unlabeled set as well (as ACR, DARP and CoSSL do)."""
    allow_empty_classes: bool = Field(False, **NOTHING)
    """Accept classes without a labeled image; their prior is floored."""
    batch_size: int = Field(64, gt=0, le=1_000_000)
    """Labeled images per step over all ranks (B)."""
    mu: int = Field(8, gt=0, le=1000)
    """Unlabeled images per labeled one; the unlabeled batch is mu * batch_size."""
    labeled_views: Literal[1, 2] | None = None
    """1: weak; 2: weak and strong; None: as the method asks."""
    strong_views: int | None = Field(None, gt=0)
    """Strong views per unlabeled image (V); None: as the method asks."""
    sampling: Literal["shuffle", "class_balanced", "square_root", "effective_number"] = "shuffle"
    """Labeled stream: a new permutation per pass, or class first and then image, the class with
    weight 1, sqrt(n) or n / effective number of its n images (data/sampling/labeled_order.py)."""
    class_balanced_steps: int = Field(0, ge=0)
    """Steps at the start that draw labeled images as `class_balanced` does, before `sampling`."""
    sampling_beta: float = Field(0.9999, ge=0, lt=1)
    """effective_number: beta of Cui et al. (2019); 0 samples as the data are, near 1 balanced."""
    cutout: Literal["auto"] | int = "auto"
    """Cutout side in pixels, 0 for none; `auto`: half the image side (16 px at 32)."""
    flip: bool | None = None
    """Random horizontal flip; None: whether it keeps the labels of this set."""
    shift: int | None = Field(None, ge=0)
    """Largest shift of the random crop in pixels; None: an eighth of the side."""
    prefetch: int = Field(2, gt=0, le=64, **NOTHING)
    """Steps that the pipeline prepares ahead."""
    resident: Literal["auto", "device", "host"] = Field("auto", **NOTHING)
    """Arrays of images on a GPU: in its memory, on the host, or (auto) in its memory if they take
    at most half of what is free when training starts. On a CPU they are on the host."""
    hw_decoder_load: float = Field(0.65, ge=0, le=1, **ROUNDING)
    """Share of the JPEG files that a GPU decodes in its hardware decoder, where it has one."""

    # Own files (`name: images`): folders, or a manifest that simpro-fast prepare wrote. The class
    # counts are those of the files, so labeled_max ... unlabeled_distribution are not looked at.
    labeled: FilePath | None = Field(None, **NOTHING)
    """Folder with one subfolder of images per class, or tar shards: a .tar file, a pattern
    (`x-{000..127}.tar`, `x-*.tar`) or a folder of them."""
    unlabeled: FilePaths = Field((), **NOTHING)
    """One or more folders of images, flat or nested, or tar shards."""
    val: FilePath | None = Field(None, **NOTHING)
    """Folder like `labeled`, to test on."""
    manifest: FilePath | None = Field(None, **NOTHING)
    """CSV or Parquet list of the images, instead of the three folders (or of ImageNet's tree)."""
    packed: FilePath | None = Field(None, **NOTHING)
    """Array that `prepare --pack` made of the manifest's images; trains from memory."""
    holdout_per_class: int = Field(0, ge=0)
    """Without `val`: labeled images of each class that are kept for testing, 0 for none; of a small
    class fewer, so that one stays labeled."""
    on_bad_image: Literal["error", "skip"] = Field("error", **NOTHING)
    """A file that cannot be used stops the run; skip: it is left out, or, where that shows only in
    training, another image takes its place. The commands on a run take it for their
    --on-bad-image."""
    max_megapixels: int = Field(179, gt=0, le=10_000, **NOTHING)
    """The largest file, in millions of pixels, that is decoded; a larger one cannot be used."""
    weak_scale: Range = (0.5, 1.0)
    """Area of the weak view's crop as a share of the image, uniform between the two."""
    strong_scale: Range = (0.2, 1.0)
    """The same for strong views."""
    crop_ratio: Range = (3 / 4, 4 / 3)
    """Width over height of both crops, log-uniform between the two."""

    @model_validator(mode="after")
    def _check_statistics(self) -> DataConfig:
        if (self.mean is None) != (self.std is None):
            raise ValueError("mean and std go together; set both, or none")
        if self.std is not None and min(self.std) <= 0:
            raise ValueError(f"std={self.std} must be positive")
        return self

    @model_validator(mode="after")
    def _check_images(self) -> DataConfig:
        given = [
            key
            for key in ("labeled", "unlabeled", "val", "manifest", "packed")
            if getattr(self, key)
        ]
        if self.name.startswith("imagenet_") and given == ["manifest"]:
            given = []
        if self.name != "images" and given:
            raise ValueError(f"{given[0]} is for own images; set name=images or leave it out")
        if self.name == "images":
            if self.manifest is None and not (self.labeled and self.unlabeled):
                raise ValueError(
                    "own images need manifest=FILE (see simpro-fast prepare), "
                    "or labeled=FOLDER and unlabeled=FOLDER"
                )
            if self.manifest is not None and set(given) & {"labeled", "unlabeled", "val"}:
                raise ValueError(f"{given[0]} and manifest exclude each other; keep one of them")
            if self.packed is not None and self.manifest is None:
                raise ValueError("packed needs the manifest that it was made from; set manifest")
        for key, largest in (("weak_scale", 1), ("strong_scale", 1), ("crop_ratio", None)):
            low, high = getattr(self, key)
            if not 0 < low <= high or (largest and high > largest):
                upper = f" <= {largest}" if largest else ""
                raise ValueError(f"{key}=[{low:g}, {high:g}] must be 0 < low <= high{upper}")
        return self

    @model_validator(mode="after")
    def _check(self) -> DataConfig:
        without = {
            "digits": "digits come with scikit-learn",
            "synthetic": "synthetic images are made up",
            "images": "own images are named by manifest, labeled and unlabeled",
        }
        if self.root is not None and self.name in without:
            raise ValueError(f"root={self.root} is not used: {without[self.name]}; leave it out")
        if self.classes is not None and self.name != "synthetic":
            raise ValueError(
                f"classes is for name=synthetic; {self.name} knows its own, leave it out"
            )
        if self.split_file is not None and self.split_seed is not None:
            raise ValueError("split_file holds the split, split_seed draws one; keep one of them")
        if self.labeled_fraction is None:
            if self.total_max is not None:
                raise ValueError("total_max needs labeled_fraction, the labeled share of it")
        elif self.unlabeled_distribution != "consistent" or self.gamma_unlabeled is not None:
            raise ValueError(
                "labeled_fraction leaves the rest of each class unlabeled; leave out "
                "unlabeled_distribution and gamma_unlabeled"
            )
        if not isinstance(self.cutout, str) and self.cutout < 0:
            raise ValueError(f"cutout must be 'auto' or >= 0 pixels, got {self.cutout}")
        return self
