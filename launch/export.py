#!/usr/bin/env python3
"""Write a trained network for other programs: `launch/export.py RUN --onnx F | --hub DIR`."""

import sys

from simpro_fast.cli.entry import run

if __name__ == "__main__":
    sys.exit(run("export"))
