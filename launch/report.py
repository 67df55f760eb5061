#!/usr/bin/env python3
"""Show a finished run again: `launch/report.py RUN [--compare OTHER_RUN]`."""

import sys

from simpro_fast.cli.report import main

if __name__ == "__main__":
    sys.exit(main())
