"""Colours, sizes and file formats that all figures share."""

from __future__ import annotations

import base64
import io
import re
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simpro_fast.answers.report.groups import Group
from simpro_fast.utils.atomic_write import replacing
from simpro_fast.utils.errors import UserError, pip_line

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PAPER, INK, MUTED, GRID, TRUTH = "#FFFFFF", "#1F2328", "#59626E", "#DDDFE2", "#9AA0A8"
# Series differ in hue and lightness for every kind of colour blindness, where there are more of
# them than hues also in line, marker and hatch.
COLOURS = (
    *("#0072B2", "#BF4F00", "#00795A", "#A8467C", "#876400"),
    *("#5B4BB7", "#B3202C", "#0F7585", "#4F6A0E", "#444B54"),
)
_DARK = {
    **{PAPER: "#16191E", INK: "#E6E8EB", MUTED: "#A3ABB6", GRID: "#363C45", TRUTH: "#737B86"},
    **dict(
        zip(
            COLOURS,
            (
                *("#4FA8E0", "#FF8A3D", "#2FC79A", "#E58ABB", "#E0B43A"),
                *("#A99BFF", "#FF7B7B", "#4CCBD8", "#B4D455", "#C9CED6"),
            ),
            strict=True,
        )
    ),
}
LINES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*")
HATCHES = ("", "//", "..", "xx", "\\\\", "++", "oo", "--", "**", "||")
SMALL = 5.0
"""Width in inches of a figure that fits a phone as well as a column of the page."""
WIDE = 14.0
"""Most inches of a figure with a place per class."""
FONT = 10.0
_LETTER = 0.075
"""Inches of a letter in a legend."""

_STYLE: dict[str, Any] = {
    "text.parse_math": False,  # a dollar in a name is a dollar
    "font.size": FONT,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "legend.frameon": False,
    "legend.fontsize": 9,
    "figure.dpi": 140,
    "figure.constrained_layout.w_pad": 0.1,
    "figure.constrained_layout.h_pad": 0.1,
    "savefig.facecolor": PAPER,
    "figure.facecolor": PAPER,
    "axes.facecolor": PAPER,
    "grid.color": GRID,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": MUTED,
    "xtick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.color": MUTED,
    "ytick.labelcolor": INK,
    "hatch.color": PAPER,
    "hatch.linewidth": 0.6,
    "svg.fonttype": "path",  # the same letters wherever the page is opened
    "svg.hashsalt": "simpro_fast",
}


@dataclass(frozen=True)
class Drawn:
    """Content of figures."""

    groups: Sequence[Group]
    class_order: np.ndarray
    """int64 [K]; one for all figures of a page, so that they can be read beside each other."""

    @property
    def class_names(self) -> list[str]:
        return [str(name) for name in self.groups[0].summary["class_names"]]

    @property
    def title(self) -> str:
        """Return the title that all figures share."""
        if len(self.groups) > 2:
            return f"{len(self.groups)} experiments"
        labels = " and ".join(short(group.label, 24) for group in self.groups)
        names = [group.name for group in self.groups]
        same = len(set(names)) == 1 and not names[0].endswith(self.groups[0].label)
        return f"{short(names[0], 32)}, {labels}" if same else labels

    def legend(self, index: int) -> str:
        """The name of a group and, of several, the number of seeds or splits."""
        group = self.groups[index]
        repeated = f" ({group.repetitions})" if len(group.runs) > 1 else ""
        return f"{short(group.label, 34)}{repeated}"


def colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


@contextmanager
def drawing() -> Iterator[None]:
    """Figures made inside have the shared style.

    Raises:
        UserError: matplotlib is missing; it is imported only where figures are wanted.
    """
    try:
        import matplotlib
    except ImportError:
        raise UserError(f"figures need matplotlib: {pip_line('report')}") from None
    style: Any = _STYLE
    with matplotlib.rc_context(style), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # drawn as a box
        yield


def new_figure(width: float, height: float) -> Figure:
    """Size in inches."""
    # Without pyplot there is no global state and no display to ask for.
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save_png(figure: Figure, path: Path) -> None:
    """Raises as `replacing` does."""
    with replacing(path) as file:
        figure.savefig(file, format="png")
    figure.set_layout_engine("none")  # the same places in other formats, not found a second time


def svg_uri(figure: Figure) -> str:
    """A data: address of the figure as SVG that follows the page between light and dark."""
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    svg = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>", "", text.getvalue(), flags=re.DOTALL)
    svg = svg[svg.index("<svg") :]
    light, dark = [], []
    for number, (day, night) in enumerate(_DARK.items()):
        svg = re.sub(day, f"var(--c{number})", svg, flags=re.IGNORECASE)
        light.append(f"--c{number}:{day}")
        dark.append(f"--c{number}:{night}")
    css = (
        f"<style>:root{{{';'.join(light)}}}"
        f"@media (prefers-color-scheme:dark){{:root{{{';'.join(dark)}}}}}</style>"
    )
    svg = svg.replace(">", f">{css}", 1)
    return f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}"


def set_title(axes: Axes, text: str, width: float, **options: Any) -> None:
    """A title of as many lines as it needs in a figure of this width in inches."""
    axes.set_title(wrapped(text, width - 0.6), **options)


def wrapped(text: str, width: float) -> str:
    """Lines that fit into `width` inches in the size of titles."""
    return textwrap.fill(text, max(12, int(width * 10.5)))


def short(name: str, limit: int) -> str:
    return name if len(name) <= limit else f"{name[: limit - 2]}.."


def legend_below(figure: Figure, axes: Axes, width: float, *, least: int = 2) -> None:
    """The legend of `axes` under the figure, if it has at least so many entries."""
    handles, labels = axes.get_legend_handles_labels()
    if len(labels) < least:
        return
    labels = [short(label, int((width - 0.9) / _LETTER)) for label in labels]
    longest = 0.5 + _LETTER * max(map(len, labels))
    columns = max(1, min(len(labels), int((width - 0.2) / longest)))
    figure.set_figheight(figure.get_figheight() + 0.18 * (-(-len(labels) // columns) - 1))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns)
