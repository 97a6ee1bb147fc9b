#!/usr/bin/env bash
# Sets where Triton and PyTorch's compiler keep compiled kernels; rank.sh and torchrun.sh source it. On each node's own disk,
# since the home folder is often a slow one that all ranks share.
cache=${SLURM_TMPDIR:-${TMPDIR:-/tmp}}/farsight-$UID
if (umask 077 && mkdir -p "$cache") && [[ -O $cache ]]; then # what another user put there could be any code
    export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$cache/triton}
    export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$cache/inductor}
fi
