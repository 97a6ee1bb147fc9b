#!/usr/bin/env bash
# Starts one rank under srun: sets the variables that PyTorch and Triton read, from Slurm's, then runs the command.
#
#     srun launch/rank.sh python train.py --job.config_file configs/X.toml
#
# The caller of srun sets MASTER_ADDR and MASTER_PORT; see slurm.sh.
set -euo pipefail

# Compiled kernels: on each node's own disk, since the home folder is often a slow one that all ranks share.
cache=${SLURM_TMPDIR:-${TMPDIR:-/tmp}}/farsight-$UID
if (umask 077 && mkdir -p "$cache") && [[ -O $cache ]]; then # what another user put there could be any code
    export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$cache/triton}
    export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$cache/inductor}
fi

export RANK=${SLURM_PROCID:?is not set: start this with srun}
export WORLD_SIZE=${SLURM_NTASKS:?is not set: start this with srun}
export LOCAL_RANK=${SLURM_LOCALID:?is not set: start this with srun}
exec "$@"
