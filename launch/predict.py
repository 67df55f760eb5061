#!/usr/bin/env python3
"""Classify images by a trained network: `launch/predict.py RUN SOURCE... --output F.csv`."""

import sys

from simpro_fast.cli.entry import run

if __name__ == "__main__":
    sys.exit(run("predict"))
