#!/usr/bin/env python3
"""Pseudo-labels, and images to label next: `launch/pseudo.py RUN --queue 100`."""

import sys

from simpro_fast.cli.entry import run

if __name__ == "__main__":
    sys.exit(run("pseudo"))
