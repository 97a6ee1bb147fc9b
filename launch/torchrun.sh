#!/usr/bin/env bash
# Trains under torchrun on all GPUs of one or several machines:
#
#     launch/torchrun.sh train --job.config_file configs/X.toml [--section.key value …]
#     launch/torchrun.sh recipe configs/recipes/X.toml [--section.key value …]
#     NODES=4 HEAD=node0:29500 launch/torchrun.sh train …         run this on each of four machines
#
# PROCESSES is the number of ranks per machine (default: its GPUs, or 1 if it has none), PYTHON the interpreter (default:
# .venv/bin/python, or python without one). Several machines need a shared folder, and meet at HEAD, a port of one of them.
set -euo pipefail

usage="usage: launch/torchrun.sh train|recipe … (see the comments at the top of this file)"
root=$(cd "$(dirname "$0")/.." && pwd)
train=(-m farsight.train)
if [[ -f $root/pyproject.toml ]]; then # a checkout; an installed package runs in the folder where it is called
    cd "$root"
    train=(train.py)
fi
python=${PYTHON:-$([[ -x .venv/bin/python ]] && echo .venv/bin/python || echo python)}
nodes=${NODES:-1}
gpus=$(nvidia-smi --list-gpus 2> /dev/null | wc -l || true)
processes=${PROCESSES:-$((gpus > 0 ? gpus : 1))}

arguments=(--nnodes "$nodes" --nproc_per_node "$processes")
if ((nodes > 1)); then
    head=${HEAD:?is not set: name a machine and port where all $nodes meet, such as HEAD=node0:29500}
    arguments+=(--rdzv_backend c10d --rdzv_endpoint "$head" --rdzv_id farsight)
else
    arguments+=(--standalone)
fi
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
