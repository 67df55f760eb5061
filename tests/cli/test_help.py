"""`--help` teaches: an overview of all verbs, and of each verb examples that its parser takes."""

from __future__ import annotations

import re
import shlex
from importlib import import_module

import pytest

from simpro_fast.cli.entry import VERBS, main
from simpro_fast.cli.keys import all_keys, markdown
from simpro_fast.config import Config
from simpro_fast.utils.errors import ConfigError
from tests import processes
from tests.conftest import ROOT


def shown(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    try:
        assert main(arguments) == 0
    except SystemExit as end:
        assert end.code == 0
    return capsys.readouterr().out


def takes(verb: str, words: list[str]) -> None:
    """The verb's parser takes these words; verbs that parse within `main` are not looked at."""
    parse = getattr(import_module(f"simpro_fast.cli.{verb}"), "parse_arguments", None)
    if parse is not None:
        try:
            parse(words)
        except ConfigError as error:
            raise AssertionError(f"{verb} {shlex.join(words)}: {error}") from None


def test_the_overview_names_every_verb_with_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown([], capsys)
    assert text == shown(["--help"], capsys)
    assert max(map(len, text.splitlines())) <= 100
    for name, verb in VERBS.items():
        assert text.count(f"\n{verb.group}:\n") == 1
        assert verb.summary in text and f"simpro-fast {name} {verb.example}" in text
        takes(name, shlex.split(verb.example))


@pytest.mark.parametrize("verb", ["--help", "train digits_lt/reversed --print-config", "watch -h"])
@pytest.mark.parametrize(("output", "code"), [(None, 1), ("/dev/full", 2)])
def test_output_that_nobody_takes_is_one_line(output: str | None, code: int, verb: str) -> None:
    """A reader that is gone, and a full disk."""
    done = processes.run(processes.printing_to, output, main, verb.split())
    assert done.returncode == code and len(done.stderr.splitlines()) == 1, done.stderr
    assert output is None or "standard output: cannot be written (disk full" in done.stderr


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_a_verb_has_examples(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown([verb, "--help"], capsys)
    assert max(map(len, text.splitlines())) <= 100
    assert "examples:" in text
    examples = text.partition("examples:")[2].replace("\\\n", " ")
    command = rf"^ +(?:.*\| )?(?:simpro-fast {verb}|\S+.* launch/{verb}\.py)(?: (.*))?$"
    commands = re.findall(command, examples, flags=re.MULTILINE)
    assert len(commands) >= 2
    for command in commands:
        takes(verb, shlex.split(command))


def test_help_of_train_lists_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    keys = shown(["train", "--help"], capsys).partition("Keys, ")[2]
    for dotted in Config.changes():
        assert re.search(rf"(?<!\w){dotted.rpartition('.')[2]}(?!\w)", keys), dotted


def test_every_key_is_explained_and_the_page_is_that_of_the_schema(
    capsys: pytest.CaptureFixture[str],
) -> None:
    keys = all_keys()
    assert {key.name for key in keys} >= set(Config.changes())
    assert [key.name for key in keys if not key.text] == []
    assert (ROOT / "docs" / "keys.md").read_text(encoding="utf-8") == markdown()
    lr = shown(["keys", "optim.lr"], capsys)
    assert lr.startswith("optim\n  optim.lr (number, > 0") and lr.count("\n") < 6
    assert "method.cotrain_after" in shown(["keys", "cossl"], capsys)
    assert main(["keys", "data.batchsize"]) == 2
    assert "did you mean data.batch_size?" in capsys.readouterr().err
