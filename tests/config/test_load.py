"""Configuration: what is accepted, and that every refusal names key, value and cure."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from simpro_fast.config import dump_config, load_config, parse_config
from simpro_fast.utils.errors import ConfigError
from tests.conftest import ROOT


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "c.yaml"
    path.write_text("name: a/b\noptim: {lr: 1e-1}\nlog: {progress: on}\n")
    return path


def test_scalars_follow_yaml_1_2(file: Path) -> None:
    config = load_config(file, ["optim.weight_decay=5e-4", "train.profile=true", "data.root=~"])
    assert config.optim.lr == 0.1
    assert config.optim.weight_decay == 5e-4
    assert config.log.progress == "on"
    assert config.train.profile is True
    assert config.data.root is None


def test_home_is_expanded(file: Path) -> None:
    assert load_config(file, ["output_dir=~/runs"]).output_dir == Path.home() / "runs"


def test_dump_reads_back(file: Path) -> None:
    config = load_config(file, ["data.name=svhn", "data.root=/x", "method.alpha=0.5", "seed=7"])
    assert parse_config(yaml.safe_load(dump_config(config))) == config


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("method.nmae=simpro", ["method.nmae", "method.name"]),
        ("threshold=0.5", ["'threshold'", "method.threshold"]),
        ("method.name=fixmtch", ["fixmtch", "'fixmatch'"]),
        ("data.unlabeled_distribution=reverse", ["'reverse'", "'reversed'"]),
        ("data.fit=pat", ["data.fit", "'pat'", "'pad'"]),
        ("data.interpolation=cubic", ["data.interpolation", "'cubic'", "'bicubic'"]),
        ("data.mu=2.5", ["data.mu", "2.5", "integer"]),
        ("data.batch_size=0", ["data.batch_size", "0"]),
        ("method.alpha=much", ["method.alpha", "much", "auto", "a number"]),
        ("method.alpha=-1", ["alpha", "-1"]),
        ("method.alpha=0", ["alpha", "0"]),
        ("optim.lr=.nan", ["optim.lr"]),
        ("train.threads=true", ["train.threads", "integer"]),
        ("train.period=50000", ["train.period=50000", "train.steps=43000"]),
        ("checkpoint.keep=1", ["checkpoint.keep=1"]),
        ("data.gamma_labeled=0.5", ["data.gamma_labeled"]),
        ("train.precision=bf61", ["bf61", "'bf16'"]),
        ("train.precision=fp16", ["one of fp32, bf16, fp64", "'bf16'"]),
        ("device=gpu", ["one of auto, cpu, cuda", "mean 'cuda'"]),
        ("data.root=/nonexistent", ["data: root=/nonexistent is not used", "leave it out"]),
        ("method=3", ["method=3"]),
        ("name='x y'", ["name"]),
        ("name=../up", ["name", ".."]),
        ("optim.warmup_steps=50000", ["optim.warmup_steps=50000", "train.steps=43000"]),
        ("data.mu=1000000", ["data.mu", "1000"]),
        ("seed", ["seed", "key.sub=value"]),
        ("seed.deep=1", ["seed"]),
    ],
)
def test_refusals(file: Path, override: str, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(file, [override])
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


def test_numbers_are_decimal_and_empty_sections_change_nothing(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("name: t\noptim:\nseed: 010\n")
    config = load_config(path, ["optim.lr=1"])
    assert (config.seed, config.optim.lr) == (10, 1.0)


@pytest.mark.parametrize("text", ["1e-3", "010", "on", "null", "~", "1_0"])
def test_dump_quotes_what_looks_like_something_else(tmp_path: Path, text: str) -> None:
    config = parse_config({"name": "t", "output_dir": text, "data": {"name": "svhn", "root": text}})
    path = tmp_path / "c.yaml"
    path.write_text(dump_config(config))
    assert load_config(path) == config


def test_impossible_combination_names_both_keys(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"zero_stage.*engine"):
        load_config(file, ["distributed.engine=plain", "distributed.zero_stage=1"])


def test_every_problem_is_named_at_once(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"(?s)data\.mu.*optim\.lr"):
        load_config(file, ["data.mu=x", "optim.lr=-1"])


def test_base_is_merged_and_the_file_wins(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("optim: {lr: 0.5, momentum: 0.8}\n")
    top = tmp_path / "top.yaml"
    top.write_text("base: base.yaml\nname: t\noptim: {lr: 0.25}\n")
    config = load_config(top)
    assert (config.optim.lr, config.optim.momentum) == (0.25, 0.8)


def test_method_wins_over_methods_of_the_bases(tmp_path: Path) -> None:
    base, file = tmp_path / "base.yaml", tmp_path / "own.yaml"
    base.write_text(
        "methods: {all: {threshold: 0.9}, simpro: {tau: 3.0, threshold: 0.8}, fixmatch: {}}\n"
    )
    file.write_text("base: base.yaml\nname: a\n")
    method = load_config(file).method
    assert (method.threshold, method.tau) == (0.8, 3.0)  # type: ignore[attr-defined]
    assert load_config(file, ["method.threshold=0.7"]).method.threshold == 0.7
    assert load_config(file, ["method.name=fixmatch"]).method.threshold == 0.9
    file.write_text("base: base.yaml\nname: a\nmethod: {threshold: 0.6}\n")
    assert load_config(file).method.threshold == 0.6
    file.write_text("base: base.yaml\nname: a\nmethods: {simpro: {threshold: 0.5}}\n")
    method = load_config(file).method
    assert (method.threshold, method.tau) == (0.5, 3.0)  # type: ignore[attr-defined]
    file.write_text("name: a\nmethods: {fixmach: {hard: true}}\n")
    with pytest.raises(ConfigError, match="no method 'fixmach'; did you mean 'fixmatch'"):
        load_config(file)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("base: c.yaml\nname: t\n", "circle"),
        ("base: nowhere.yaml\nname: t\n", "nowhere.yaml"),
        ("name: t\nname: u\n", "twice"),
        ("- 1\n- 2\n", "sections"),
        ("name: [\n", r"c\.yaml, line 2, column 1, is not valid YAML: .*expected"),
        ("name: a\nseed: \x01\n", r"c\.yaml is not valid YAML: .*character 15"),
        ("name: !!python/object/apply:os.system ['true']\n", "not valid YAML"),
        ("seed: 2\n", "'name' is missing"),
        ("1: 2\nname: t\n", "line 1, .*key 1 is not a name"),
        ("? [a, b]\n: 1\n", "is not a name"),
    ],
)
def test_bad_files(tmp_path: Path, text: str, match: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=match) as caught:
        load_config(path)
    assert not any(odd in str(caught.value) for odd in ("\n", "^", "<unicode"))


ODD = {
    "aliases": ("name: t\na: &a [x]\ndata: {unlabeled: *a}\n", r"line 3.*aliases.*`base: FILE`"),
    "a merge key": ("name: t\ntrain: &t {steps: 3}\nmodel: {<<: *t}\n", "line 3.*aliases"),
    "deep list": (f"name: t\nseed: {'[' * 2000}\n", "nested too deep"),
    "many digits": (f"name: t\nseed: {'9' * 100_000}\n", "digits"),
    "long text": (f"name: t\ndevice: {'x' * 2**17}\n", "device='xxx"),
    "long key": (f"name: t\n{'x' * 2**17}: 1\n", "valid YAML"),
    "many wrong keys": ("name: t\n" + "".join(f"x{n}: 1\n" for n in range(500)), "; and more$"),
    "many wrong values": (f"name: t\ndata: {{unlabeled: [{'1, ' * 5000}]}}\n", "unlabeled="),
    "an integer that is none": ("name: t\nseed: !!int x\n", "not valid YAML"),
    "a truth that is none": ("name: t\nseed: !!bool x\n", "not valid YAML"),
    "a date": ("name: t\nseed: !!timestamp 2020-01-01\n", "not valid YAML"),
    "NUL": ('name: t\noutput_dir: "a\\0b"\n', "NUL"),
    "nobody's home": ("name: t\noutput_dir: ~nobody-of-this-name/x\n", "there is no user"),
    "bytes": ("name: t\n\udcff: 1\n", "not UTF-8"),
}


@pytest.mark.parametrize(("text", "match"), ODD.values(), ids=ODD)
def test_whatever_a_file_holds_the_answer_is_one_short_line(
    tmp_path: Path, text: str, match: str
) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text, errors="surrogateescape")
    with pytest.raises(ConfigError, match=match) as caught:
        load_config(path)
    assert len(str(caught.value)) < 3000 and "\n" not in str(caught.value)


@pytest.mark.parametrize("value", ["[&a x, *a]", "[" * 2000, "9" * 5000, "!!python/name:os.kill x"])
def test_override_that_is_no_yaml(file: Path, value: str) -> None:
    with pytest.raises(ConfigError, match=r"override data\.unlabeled: .*not valid YAML") as caught:
        load_config(file, [f"data.unlabeled={value}"])
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("configs/digits_lt", "is a folder; take one of its files: consistent, "),
        ("configs/digits_lt/none.yaml", "; there is consistent, "),
        ("configs/digits_lt/reversd.yaml", "; did you mean 'configs/digits_lt/reversed'?"),
        ("digit_lt/reversed", "; did you mean 'digits_lt/reversed'?"),
        ("x", "; the shipped ones are in cifar100_lt, "),
    ],
)
def test_missing_files_and_folders_say_what_there_is(
    source: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(ConfigError) as caught:
        load_config(source)
    assert message in str(caught.value)


def test_what_is_there_and_no_file_is_called_by_its_kind(tmp_path: Path) -> None:
    (tmp_path / "loop.yaml").symlink_to("loop.yaml")
    with pytest.raises(ConfigError, match=r"loop\.yaml is a circle of links"):
        load_config(tmp_path / "loop.yaml")
    top = tmp_path / "top.yaml"
    for base, words in {
        "loop.yaml": "is a circle of links",
        ".": "is a folder",
        "gone.yaml": "does not exist",
        "a" * 5000: "cannot be read",
    }.items():
        top.write_text(f"base: {base}\n")
        with pytest.raises(ConfigError, match=rf"top\.yaml: base file .*{words}") as found:
            load_config(top)
        assert len(str(found.value)) < 600
    (tmp_path / "other.yaml").write_text("just text\n")
    top.write_text("base: other.yaml\n")
    with pytest.raises(ConfigError, match=r"base of .*top\.yaml: .*other\.yaml must hold"):
        load_config(top)
    top.write_text("a: " + "[" * 9000)
    with pytest.raises(ConfigError, match=r"top\.yaml is not valid YAML: it is nested too deep"):
        load_config(top)
