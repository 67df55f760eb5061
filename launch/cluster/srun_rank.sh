#!/bin/sh
# One rank under srun: sets the variables of torch's launchers from Slurm's, then replaces this shell
# by the command (exec), so that it gets the signals that srun forwards.
set -eu
export RANK="$SLURM_PROCID" LOCAL_RANK="$SLURM_LOCALID" WORLD_SIZE="$SLURM_NTASKS"
export LOCAL_WORLD_SIZE="$SLURM_NTASKS_PER_NODE"
exec "$@"
