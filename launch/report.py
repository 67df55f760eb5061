#!/usr/bin/env python3
"""Show a finished run again: `launch/report.py RUN [--compare OTHER_RUN]`."""

import sys

from simpro_fast.cli.entry import run

if __name__ == "__main__":
    sys.exit(run("report"))
