"""The model card of a run: Markdown with the front matter that model hubs read."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from simpro_fast.answers.estimation.calibration import chance_warning
from simpro_fast.answers.model_file import ModelFile
from simpro_fast.utils.printable import printable

CARD = "README.md"
OWN = "own images"
_FITS = {
    "crop": "its largest centred square is scaled to {} px",
    "pad": "its longer side is scaled to {} px",
    "squash": "it is stretched to a square of {} px",
}


def model_card(file: ModelFile, summary: Mapping[str, Any], dataset: str) -> str:
    """Write what was trained on what, how well it does, how to use it, and what it cannot do.

    It names no place on the machine that trained it.

    Args:
        summary: content of `summary.json`.
        dataset: name of the data set.
    """
    dataset = OWN if dataset == "images" else dataset
    parts = [_front_matter(file, summary, dataset), _title(file, summary, dataset)]
    parts += [_accuracy(summary), _use(file), _limits(file), _training(file, summary)]
    return "\n".join(parts)


def _front_matter(file: ModelFile, summary: Mapping[str, Any], dataset: str) -> str:
    content: dict[str, Any] = {
        # Whose weights these are is not for a program to say; hubs take `other` with a name.
        "license": "other",
        "license_name": "not-chosen-yet",
        "library_name": "simpro_fast",
        "pipeline_tag": "image-classification",
        "tags": ["image-classification", "semi-supervised-learning", "long-tailed", file.method],
        "metrics": ["accuracy"],
    }
    if summary["top1"] is not None:
        content["model-index"] = [
            {
                "name": summary["name"],
                "results": [
                    {
                        "task": {"type": "image-classification"},
                        "dataset": {"name": printable(dataset), "type": printable(dataset)},
                        "metrics": [{"type": "accuracy", "value": round(summary["top1"] / 100, 4)}],
                    }
                ],
            }
        ]
    return f"---\n{yaml.safe_dump(content, sort_keys=False, allow_unicode=True)}---\n"


def _title(file: ModelFile, summary: Mapping[str, Any], dataset: str) -> str:
    labeled, unlabeled = sum(summary["labeled_counts"]), summary["unlabeled_counts"]
    source = "from its maker's own files" if dataset == OWN else f"of {_text(dataset)}"
    others = "unlabeled images" if unlabeled is None else f"{sum(unlabeled):,} unlabeled images"
    return (
        f"# {_text(summary['name'])}\n\n"
        f"A classifier of {len(file.class_names)} classes ({_text(file.model.name)}), trained with "
        f"simpro_fast by the method {_text(file.method)} on {labeled:,} labeled images and "
        f"{others} {source} ({file.image_size} px, {file.step:,} steps, seed "
        f"{summary['seed']}). The weights are a moving average of those in training.\n"
    )


def _accuracy(summary: Mapping[str, Any]) -> str:
    if summary["top1"] is None:
        return "## Accuracy\n\nNot measured: the run had no test images.\n"
    names = ("top1", "top1_class_mean", "many", "medium", "few")
    titles = ("all images", "class mean", "many labels (> 100)", "medium", "few (< 20)")
    cells = ["-" if summary[name] is None else f"{summary[name]:.1f}" for name in names]
    return "## Accuracy\n\nTop-1 on the test images of the run, in %:\n\n" + _table(titles, [cells])


def _use(file: ModelFile) -> str:
    bars = f", between bars of the colour RGB {file.square.fill}" if file.fit == "pad" else ""
    return (
        "## Use\n\n"
        "```python\n"
        "from simpro_fast import load_model\n\n"
        'model = load_model("FOLDER")  # that holds this file\n'
        'print(model.predict("picture.jpg")[0])\n'
        "```\n\n"
        f"A picture becomes RGB; {_FITS[file.fit].format(file.image_size)} with an antialiased "
        f"{file.interpolation} filter{bars}, and normalised per channel by mean "
        f"{_numbers(file.mean)} and standard deviation {_numbers(file.std)} (scale 0 to 1).\n"
    )


def _limits(file: ModelFile) -> str:
    calibrated = (
        f"divide the logits by the temperature {file.temperature:.2f} before using them as such"
        if file.temperature is not None
        else "they are not calibrated"
    )
    lines = [
        "Every picture gets one of the classes, also one that shows none of them.",
        f"Probabilities are a softmax of the logits; {calibrated}.",
        "Pictures of another source, or with another mixture of classes, are recognised less well "
        "than the accuracy above says.",
    ]
    if chance := chance_warning(file.confusion):
        lines.insert(0, f"{chance[0].upper()}{chance[1:]}.")
    return "## Limits\n\n" + "".join(f"- {line}\n" for line in lines)


def _training(file: ModelFile, summary: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{_text(name)} {_text(text)}" for name, text in file.versions.items())
    commit = f"commit `{_text(file.commit)}`, " if file.commit else ""
    return (
        "## Training\n\n"
        f"{summary['seconds'] / 60:.1f} minutes, {commit}{versions}. simpro_fast implements "
        "SimPro (Du, Han and Huang: SimPro: A Simple Probabilistic Framework Towards Realistic "
        "Long-Tailed Semi-Supervised Learning, ICML 2024) and methods to compare it with. The "
        "license of these weights is not chosen yet: set it in the first lines before you publish "
        "them.\n"
    )


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _text(value: object) -> str:
    """A name from outside, as text alone: no markup, no cell or line of its own."""
    shown = html.escape(printable(value), quote=False)
    return "".join(f"&#{ord(c)};" if c in "|`*[]\\" else c for c in shown)


def _numbers(values: Sequence[float]) -> str:
    return "(" + ", ".join(f"{value:.4g}" for value in values) + ")"
