#!/usr/bin/env python3
"""Table and figures of a finished run: `launch/report.py RUN [--compare OTHER_RUN]`."""

import sys

from simpro_fast.cli.entry import run

if __name__ == "__main__":
    sys.exit(run("report"))
