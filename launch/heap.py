#!/usr/bin/env python3
"""Class shares of a heap of images: `launch/heap.py RUN FOLDER... --calibrate VAL`."""

import sys

from simpro_fast.cli.entry import run

if __name__ == "__main__":
    sys.exit(run("heap"))
