#!/usr/bin/env python3
"""Train and tabulate experiments: `launch/table.py CONFIG... [--grid K=A,B] [--seeds 1,2]`."""

import sys

from simpro_fast.cli.entry import run

if __name__ == "__main__":
    sys.exit(run("table"))
