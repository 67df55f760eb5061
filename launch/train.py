#!/usr/bin/env python3
"""Train: `deepspeed launch/train.py --config configs/digits_lt/reversed.yaml [key.sub=value ...]`.

The same script runs under `torchrun` and plain `python`.
"""

import sys

from simpro_fast.cli.entry import run

if __name__ == "__main__":
    sys.exit(run("train"))
