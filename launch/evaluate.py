#!/usr/bin/env python3
"""Accuracy and calibration of a trained network: `launch/evaluate.py RUN DATA`."""

import sys

from simpro_fast.cli.entry import run

if __name__ == "__main__":
    sys.exit(run("evaluate"))
