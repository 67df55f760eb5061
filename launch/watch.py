#!/usr/bin/env python3
"""Watch a run: `launch/watch.py RUN [--once]`."""

import sys

from simpro_fast.cli.entry import run

if __name__ == "__main__":
    sys.exit(run("watch"))
