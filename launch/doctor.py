#!/usr/bin/env python3
"""Check a machine or an allocation: `deepspeed launch/doctor.py [--config FILE] [--output DIR]`."""

import sys

from simpro_fast.cli.entry import run

if __name__ == "__main__":
    sys.exit(run("doctor"))
