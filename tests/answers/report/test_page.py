"""The HTML page: complete, closed to the network, and harmless whatever the names are."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from simpro_fast.cli.report import main
from tests.answers.report.made_runs import make_run
from tests.answers.report.small_runs import make_summary, write_run
from tests.processes import PATIENCE

NASTY = [
    "<script>alert(1)</script>",
    "a\"b'c & d</style>",
    "\u202egnp.cat",
    "x" * 300,
    "{{ 7 * 7 }}{% for %}",
    "قطة",
    "-->]]>",
]
RUN_NAME = "<img src=x onerror=alert(1)>/\u2066\"'"
SECTIONS = (
    *("summary", "unlabeled", "training", "classes", "confusion", "reliability", "views"),
    *("mistakes", "configuration", "machine"),
)


class Page(HTMLParser):
    """Tags with their attributes, and the text of each section."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: dict[str, str] = {}
        self._section, self._open = "", list[str]()
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)
        assert not self._open, "tags that are not closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "img", "source", "br"):
            self._open.append(tag)
        if tag == "section":
            self._section = str(dict(attrs)["id"])

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text[self._section] = self.text.get(self._section, "") + data

    def addresses(self) -> list[str]:
        """What a browser could fetch."""
        names = ("src", "srcset", "href", "action", "data", "poster", "background")
        return [str(value) for _, at in self.tags for name, value in at.items() if name in names]


def report(*arguments: str) -> Page:
    assert main(list(arguments)) == 0
    folder = Path(arguments[0]) / "report"
    return Page(folder / "report.html")


@pytest.fixture(scope="module")
def nasty(tmp_path_factory: pytest.TempPathFactory) -> Page:
    folder = tmp_path_factory.mktemp("runs") / "<b>&"
    path = make_run(
        folder / "seed1",
        name=RUN_NAME,
        class_names=NASTY,
        shares=True,
        evaluated=True,
        pictures=True,
    )
    return report(str(path))


def test_every_section_has_its_content(nasty: Page) -> None:
    assert [at["id"] for tag, at in nasty.tags if tag == "section"] == list(SECTIONS)
    text = nasty.text
    for section, parts in {
        "summary": (
            *("The unlabeled images are mostly class", "overall, %", "KL(true"),
            *("expected calibration error", "0.0710", "temperature that fits best", "1.420"),
        ),
        "unlabeled": ("estimate, %", " to "),
        "classes": ("labeled",),
        "views": ("12 \u00d7 12 pixels", "rotate 3, solarize 2"),
        "mistakes": ("99.0 %", "in truth"),
        "configuration": ("method.threshold", "data.labeled_max"),
        "machine": ("Some(R) Processor", "2.14.1", "finished", "2 min"),
    }.items():
        for part in parts:
            assert part in text[section], (section, part)
    pictures = sum(str(at.get("src")).startswith("data:image/svg") for _, at in nasty.tags)
    assert pictures == 8, "prior, KL, accuracy, pseudo-labels, classes twice, confusion, ..."
    small = sum(str(at.get("src")).startswith("data:image/png") for _, at in nasty.tags)
    assert small == 6 * 4 + 6, "six images in four views, and six mistakes"


def test_nothing_is_fetched_and_nothing_runs(nasty: Page) -> None:
    assert all(re.match(r"data:image/|#\w+$", address) for address in nasty.addresses())
    assert not {tag for tag, _ in nasty.tags} & {"script", "iframe", "object", "link", "base"}
    assert not [name for _, at in nasty.tags for name in at if name.startswith("on")]
    policies = [at["content"] for _, at in nasty.tags if at.get("http-equiv")]
    assert policies == ["default-src 'none'; img-src data:; style-src 'unsafe-inline'"]
    assert not re.search(r"url\(|@import|https?:", nasty.text[""])
    for address in nasty.addresses():
        head, _, content = address.partition(",")
        if head.startswith("data:image/svg"):
            svg = base64.b64decode(content).decode()
            for node in ElementTree.fromstring(svg).iter():
                for name, value in node.attrib.items():
                    if name.endswith("href"):
                        assert re.match(r"#|data:image/png", value)
            assert "prefers-color-scheme:dark" in svg and "script" not in svg


def test_names_are_shown_and_not_obeyed(nasty: Page) -> None:
    escaped = [name.replace("\u202e", "\\u202e") for name in NASTY]
    for name in escaped:
        assert name in nasty.text["unlabeled"]
    assert "<img src=x onerror=alert(1)>/\\u2066\"'" in nasty.text[""]
    assert "\u202e" not in nasty.source and "\u2066" not in nasty.source


def test_a_mailed_page_does_not_tell_whose_machine_it_was(tmp_path: Path) -> None:
    folder = tmp_path / "ann's home"
    for name in ("a", "b"):
        make_run(
            folder / name,
            name=name,
            data={"root": f"{folder}/photos {name}", "sources": [f"{folder}/x", f"{folder}/y"]},
            checkpoint={"resume": f"{folder}/{name}/checkpoints/step_000000004.pt"},
        )
    (folder / "a" / "report").mkdir()
    (folder / "a" / "report" / "views.npz").write_bytes(b"no archive")
    page = report(str(folder))
    assert "ann" not in page.source and str(tmp_path) not in page.source
    assert "photos b" in page.text["configuration"]
    assert "step_000000004.pt" in page.text["configuration"]


def test_what_a_run_lacks_is_said(tmp_path: Path) -> None:
    path = make_run(tmp_path / "seed1", finished=False)
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    keep = ("step", "period", "pi_u")
    lines = [json.dumps({key: row[key] for key in keep}) + "\n" for row in rows]
    (path / "metrics.jsonl").write_text("".join(lines))
    split = json.loads((path / "split.json").read_text())
    (path / "split.json").write_text(json.dumps({**split, "unlabeled_counts": None}))
    page = report(str(path))
    assert [at["id"] for tag, at in page.tags if tag == "section"] == list(SECTIONS)
    for section, said in {
        "summary": "not finished, step 600 of 1,200",
        "training": "KL: the true distribution is not known",
        "classes": "nothing was evaluated",
        "confusion": "No evaluation",
        "reliability": "No evaluation",
        "views": "No run has left",
        "mistakes": "No run has left",
    }.items():
        assert said in page.text[section]


def test_tables_have_the_classes_in_the_order_of_the_figures(tmp_path: Path) -> None:
    path = write_run(tmp_path / "seed1", make_summary(labeled_counts=[5, 40, 20, 40]))
    page = report(str(path))
    for section in ("unlabeled", "classes"):
        assert "Numbers, classes with most labeled images first" in page.text[section]
        assert re.findall(r"name\d", page.text[section]) == ["name1", "name3", "name2", "name0"]


def test_experiments_share_a_page(tmp_path: Path) -> None:
    for name in ("a", "b"):
        for seed in (1, 2):
            make_run(tmp_path / f"{name}/seed{seed}", name=name, seed=seed, evaluated=seed == 1)
    page = report(str(tmp_path))
    assert page.text["summary"].count("\u00b1") >= 2 * 8
    assert "name" in page.text["configuration"] and "What differs" in page.text["configuration"]
    assert page.text["machine"].count("Some(R) Processor") == 4
    assert len(list((tmp_path / "report").glob("confusion_?.png"))) == 2


def test_compared_experiments_have_their_noise_and_their_own_labels(tmp_path: Path) -> None:
    for split, level in ((1, 0.0), (2, 1.0), (3, 3.0)):
        run = {"split_seed": split, "seed": split}
        make_run(tmp_path / f"a/seed{split}", name="a", **run)
        make_run(tmp_path / f"b/seed{split}", name="b", level=level - 40, **run)
    make_run(tmp_path / "c/seed1", name="c", split_seed=1, labeled_max=60)
    page = report(str(tmp_path), "--force")
    assert "standard error over splits" in page.text["summary"]
    words = " ".join(page.text["summary"].partition("Differences")[2].split())
    assert words.startswith("minus adifferencestandard errorsplits b")
    # Difference, standard error, splits, verdict.
    assert re.search(r"Accuracy, points-\d\d\.\d\d\.\d3behind", words)
    for section in ("unlabeled", "classes"):
        heads = " ".join(page.text[section].split())
        assert "classa: labeledb: labeledc: labeled" in heads
        assert "name015015060" in heads


def test_missing_jinja2_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert main([str(make_run(tmp_path / "seed1"))]) == 1
    assert re.fullmatch(
        r"error: the page of a report needs jinja2: `pip install .*\n", capsys.readouterr().err
    )


CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium (Debian package chromium)")
@pytest.mark.parametrize("width", [390, 1400])
@pytest.mark.parametrize(("scheme", "paper"), [(1, (255, 255, 255)), (0, (22, 25, 30))])
def test_a_browser_shows_it(
    nasty: Page, tmp_path: Path, width: int, scheme: int, paper: tuple[int, ...]
) -> None:
    """Nothing reaches beyond the window, and no figure keeps the colours of the other theme."""
    (tmp_path / "page.html").write_text(nasty.source)
    shot = tmp_path / "shot.png"
    subprocess.run(
        [
            *(str(CHROMIUM), "--headless=new", "--no-sandbox", "--disable-gpu"),
            *("--hide-scrollbars", f"--window-size={width},9000"),
            f"--blink-settings=preferredColorScheme={scheme}",
            *(f"--screenshot={shot}", f"--user-data-dir={tmp_path / 'profile'}"),
            (tmp_path / "page.html").as_uri(),
        ],
        check=True,
        capture_output=True,
        timeout=PATIENCE,
    )
    pixels = np.asarray(Image.open(shot).convert("RGB")).astype(int)
    assert pixels.shape[1] == width
    same = (np.abs(pixels - paper) <= 1).all(axis=2)
    margin = 12
    assert same[:, -margin:].all(), "something reaches beyond the page"
    assert not same[:3000, margin:-margin].all(axis=1)[:200].all()
    other = 255 - np.array(paper) > 127
    foreign = (pixels > 250).all(axis=2) if other.all() else (pixels < 40).all(axis=2)
    assert foreign.mean() < 0.06, "a figure in the other theme"
