#!/usr/bin/env bash
# Trains under Slurm with one rank per GPU, from the folder in which sbatch is called:
#
#     sbatch --nodes 4 launch/slurm.sh train --job.config_file configs/X.toml [--section.key value …]
#     sbatch --nodes 4 launch/slurm.sh recipe configs/recipes/X.toml [--section.key value …]
#
# sbatch's own options (--gpus-per-node, --ntasks-per-node, --time, --partition, …) override those below. Ten minutes
# before the time limit, and on preemption, ranks get SIGTERM: they save and end with status 75, and the job is requeued
# and continues from there. The folder must be visible to all nodes. To stop a job by hand:
#
#     scancel --full --signal=TERM JOB    ranks save and end; the signal reaches this script too, which then does not requeue
#     scancel --signal=TERM JOB           ranks save and end, and the job is requeued
#
# A plain `scancel JOB` kills them after Slurm's KillWait (30 s), in which a large model is not saved: the weights and moments of
# 8 billion parameters are 96 GB. On preemption that time is the partition's GraceTime.
# PYTHON is the interpreter (default: .venv/bin/python in that folder, or python without one). Ranks write to runs/slurm/JOB/rank-N.log.
#
#     CONTAINER=farsight.sif sbatch --nodes 4 launch/slurm.sh train|recipe …
#
# runs all of it in an Apptainer image (containers/farsight.def), which sees that folder: on each node, the image's torchrun.sh
# starts as many ranks as there would be tasks, and writes to runs/slurm/JOB/node-N.log.
#
#SBATCH --job-name=farsight
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@600
#SBATCH --requeue
#SBATCH --open-mode=append
set -uo pipefail

usage="usage: sbatch launch/slurm.sh train|recipe … (see the comments at the top of this file)"
cd "${SLURM_SUBMIT_DIR:?is not set: $usage}" || exit 2
python=${PYTHON:-$([[ -x .venv/bin/python ]] && echo .venv/bin/python || echo python)}
train=(train.py)
rank=(launch/rank.sh)
if [[ -z ${CONTAINER:-} && ! -f train.py ]]; then # no checkout: the installed package has both
    train=(-m farsight.train)
    rank=(bash "$("$python" -c 'import farsight; print(farsight.__path__[0])')/launch/rank.sh")
fi
logs=runs/slurm/$SLURM_JOB_ID
mkdir -p "$logs"

# All ranks meet at the first node, at a port that is unlikely to clash with other jobs on it.
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
export MASTER_ADDR MASTER_PORT
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}

# --wait: once a rank ends, with or without an error, the others have five minutes. Since Slurm 22.05, srun no longer takes the
# CPUs per task from the job, and a rank would share one core with its data threads.
cpus=${SLURM_CPUS_PER_TASK:+--cpus-per-task=$SLURM_CPUS_PER_TASK}
ranks=(srun ${cpus:+"$cpus"} --wait=300 --open-mode=append "--output=$logs/rank-%t.log" "${rank[@]}" "$python")
if [[ ${1:-} != train && ${1:-} != recipe ]]; then
    echo "$usage" >&2
    exit 2
elif [[ -n ${CONTAINER:-} ]]; then
    export NODES=$SLURM_JOB_NUM_NODES HEAD=$MASTER_ADDR:$MASTER_PORT PROCESSES=${SLURM_NTASKS_PER_NODE:-1}
    command=(srun --ntasks="$NODES" --ntasks-per-node=1 ${cpus:+--cpus-per-task=$((SLURM_CPUS_PER_TASK * PROCESSES))}
        --wait=300 --open-mode=append "--output=$logs/node-%t.log"
        apptainer exec --nv --bind "$PWD" --pwd "$PWD" "$CONTAINER" torchrun.sh "$@")
elif [[ $1 == train ]]; then
    command=("${ranks[@]}" "${train[@]}" "${@:2}")
else
    command=("$python" -m farsight recipe --launcher "${ranks[*]@Q}" "${@:2}")
fi

# A plain scancel and one with --full signal this shell as well; the time limit and preemption do not.
cancelled=
trap 'cancelled=yes' TERM
"${command[@]}"
status=$?
if [[ $status -eq 75 && -z $cancelled ]]; then
    echo "stopped with a checkpoint; requeued"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
