#!/usr/bin/env bash
# One rank under srun: Slurm's numbers under the names that PyTorch reads, then the command.
#
#     srun launch/rank.sh python train.py --job.config_file configs/X.toml
#
# MASTER_ADDR and MASTER_PORT come from whoever calls srun; see slurm.sh.
set -euo pipefail

export RANK=${SLURM_PROCID:?is not set: start this with srun}
export WORLD_SIZE=${SLURM_NTASKS:?is not set: start this with srun}
export LOCAL_RANK=${SLURM_LOCALID:?is not set: start this with srun}
exec "$@"
