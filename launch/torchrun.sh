#!/usr/bin/env bash
# Trains under torchrun on all GPUs of one or several machines:
#
#     launch/torchrun.sh train --job.config_file configs/X.toml [--section.key value …]
#     launch/torchrun.sh recipe configs/recipes/X.toml [--section.key value …]
#     NODES=4 HEAD=node0:29500 launch/torchrun.sh train …         run this on each of four machines
#
# PROCESSES is the number of ranks per machine (default: its GPUs, or 1 if it has none), PYTHON the interpreter (default:
# .venv/bin/python, or python without one). Several machines need a shared folder, and meet at HEAD, a port of one of them.
# NODE_RANK, 0 on that one, is for machines that can't tell by HEAD's name. Where SkyPilot or one of Kubeflow's operators starts
# this script, their variables say all three.
set -euo pipefail

usage="usage: launch/torchrun.sh train|recipe … (see the comments at the top of this file)"
here=$(dirname "$(readlink -f "$0")") # images have a link to this script beside their other commands
root=${here%/*}
train=(-m farsight.train)
if [[ -f $root/pyproject.toml ]]; then # a checkout; an installed package runs in the folder where it is called
    cd "$root"
    train=(train.py)
fi
python=${PYTHON:-$([[ -x .venv/bin/python ]] && echo .venv/bin/python || echo python)}
nodes=${NODES:-${SKYPILOT_NUM_NODES:-${PET_NNODES:-1}}}
if [[ ! $nodes =~ ^[1-9][0-9]*$ ]]; then
    echo "NODES (or SKYPILOT_NUM_NODES, or PET_NNODES) is '$nodes': it must be the number of machines, such as 4" >&2
    exit 2
fi
gpus=$(nvidia-smi --list-gpus 2> /dev/null | wc -l || true)
processes=${PROCESSES:-$((gpus > 0 ? gpus : 1))}

arguments=(--nnodes "$nodes" --nproc_per_node "$processes")
if ((nodes > 1)); then
    addresses=${SKYPILOT_NODE_IPS:-} # one a line
    HEAD=${HEAD:-${addresses%%$'\n'*}}
    HEAD=${HEAD:-${PET_MASTER_ADDR:+$PET_MASTER_ADDR:${PET_MASTER_PORT:?is not set, but PET_MASTER_ADDR is}}}
    : "${HEAD:?is not set: name a machine and port where all $nodes meet, such as HEAD=node0:29500}"
    # Machines may start minutes apart, while they pull images for example; torchrun's default is one minute.
    meeting=read_timeout=900,join_timeout=900
    rank=${NODE_RANK:-${SKYPILOT_NODE_RANK:-${PET_NODE_RANK:-}}}
    if [[ $rank ]]; then # without it, torchrun compares HEAD with the machine's names, which a cluster's DNS may not know yet
        meeting+=,is_host=$([[ $rank == 0 ]] && echo true || echo false)
    fi
    arguments+=(--rdzv_backend c10d --rdzv_endpoint "$HEAD" --rdzv_id farsight --rdzv_conf "$meeting")
else
    arguments+=(--standalone)
fi
# shellcheck source=/dev/null
source "$here/caches.sh"
# torchrun's default gives ranks 30 s to end after a signal, but a large model takes longer to save.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-3600}

case ${1:-} in
    train) exec "$python" -m farsight torchrun "${arguments[@]}" "${train[@]}" "${@:2}" ;;
    recipe) exec "$python" -m farsight recipe --torchrun "${arguments[*]}" "${@:2}" ;;
    *)
        echo "$usage" >&2
        exit 2
        ;;
esac
