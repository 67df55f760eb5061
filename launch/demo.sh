#!/bin/sh
# The demo: trains SimPro and FixMatch on the embedded digits and compares them, FixMatch also with
# class-balanced labeled draws for its first 100 steps.
set -eu
config=configs/digits_lt/reversed.yaml
deepspeed launch/train.py --config "$config"
deepspeed launch/train.py --config "$config" name=digits_lt/fixmatch method.name=fixmatch
deepspeed launch/train.py --config "$config" name=digits_lt/fixmatch_start method.name=fixmatch \
    data.class_balanced_steps=100
simpro-fast report runs/digits_lt/reversed/seed1 runs/digits_lt/fixmatch/seed1 runs/digits_lt/fixmatch_start/seed1
cat <<'END'

reversed is SimPro. fixmatch_start shows how far class-balanced labeled draws at the start take FixMatch
by themselves; only what SimPro has beyond that can be of its adjustments and its estimate of the class
distribution. One split of few labels says little: docs/results.md has it over split seeds, with
standard errors.
END
