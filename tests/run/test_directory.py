"""What a run directory says of the command that made it."""

from __future__ import annotations

import shlex

import pytest

from simpro_fast.run.directory import without_secrets


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("train.py checkpoint.keep=3 --token=abc", "train.py checkpoint.keep=3 --token=***"),
        ("train.py --api-key abc --dry-run", "train.py --api-key *** --dry-run"),
        ("train.py --hub-token -abc x", "train.py --hub-token *** x"),
        (
            "hub.password=abc AWS_SECRET_ACCESS_KEY=a=b",
            "hub.password=*** AWS_SECRET_ACCESS_KEY=***",
        ),
        ("data.root=https://me:abc@host/x", "data.root=https://***@host/x"),
        ("data.root=/data/tokens optim.lr=0.1", "data.root=/data/tokens optim.lr=0.1"),
    ],
)
def test_secrets_of_the_command_line_are_left_out(given: str, shown: str) -> None:
    assert without_secrets(shlex.split(given)) == shlex.split(shown)
