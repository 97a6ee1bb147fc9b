#!/usr/bin/env bash
# Starts one rank under srun: sets the variables that PyTorch and Triton read, from Slurm's, then runs the command.
#
#     srun launch/rank.sh python train.py --job.config_file configs/X.toml
#
# The caller of srun sets MASTER_ADDR and MASTER_PORT; see slurm.sh.
set -euo pipefail

# shellcheck source=/dev/null
source "$(dirname "$0")/caches.sh"

export RANK=${SLURM_PROCID:?is not set: start this with srun}
export WORLD_SIZE=${SLURM_NTASKS:?is not set: start this with srun}
export LOCAL_RANK=${SLURM_LOCALID:?is not set: start this with srun}
exec "$@"
