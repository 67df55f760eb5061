#!/bin/sh
# One rank under srun: Slurm's numbers under the names that launchers use, then the command itself,
# which takes this shell's place and so gets the signals that srun passes on.
set -eu
export RANK="$SLURM_PROCID" LOCAL_RANK="$SLURM_LOCALID" WORLD_SIZE="$SLURM_NTASKS"
export LOCAL_WORLD_SIZE="$SLURM_NTASKS_PER_NODE"
exec "$@"
