#!/usr/bin/env python3
"""Check a data set before training: `launch/prepare.py --labeled D --unlabeled D --output D`."""

import sys

from simpro_fast.cli.entry import run

if __name__ == "__main__":
    sys.exit(run("prepare"))
