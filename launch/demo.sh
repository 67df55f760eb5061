#!/bin/sh
# The demo: trains SimPro and FixMatch on the embedded digits and compares them.
set -eu
config=configs/digits_lt/reversed.yaml
deepspeed launch/train.py --config "$config"
deepspeed launch/train.py --config "$config" name=digits_lt/reversed_fixmatch method.name=fixmatch
simpro-fast report runs/digits_lt/reversed/seed1 --compare runs/digits_lt/reversed_fixmatch/seed1
