#!/usr/bin/env bash
# Checks an image from within, on the CPU and in a minute: two ranks train a tiny model, get SIGTERM in the middle, save and end
# with status 75, and the same command trains to the last step.
#
#     docker run --rm --volume ./containers/check.sh:/check.sh:ro farsight:cpu /check.sh
#     apptainer exec --contain --bind ./containers/check.sh:/check.sh farsight.sif /check.sh
set -euo pipefail

# Prints commands and what they print, so that the output tells what was run.
PS4='$ '
set -x

folder=$(mktemp -d)
cd "$folder"
[[ $(id -u) != 0 ]]
farsight --version

export CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 PROCESSES=2
run=(torchrun.sh train --job.config_file tiny --job.dump_folder run --training.steps 100 --training.seq_len 64)
run+=(--tokenizer.kind bytes --checkpoint.interval 1000 --validation.enable false --metrics.log_freq 1)

# As an engine stops a container: SIGTERM to its first process.
tini -s -- "${run[@]}" &
until [[ $(grep --count loss run/metrics.jsonl 2> /dev/null) -ge 3 ]]; do
    kill -0 $!
    sleep 0.2
done 2> /dev/null
kill -TERM $!
status=0
wait $! || status=$?
[[ $status == 75 ]]
saved=(run/checkpoint/step-*)
[[ ${#saved[@]} == 1 ]]

tini -s -- "${run[@]}"
# Every step once.
[[ $(grep --count '"loss"' run/metrics.jsonl) == 100 ]]
[[ -f run/model/model.safetensors ]]

rm -r "$folder"
{ set +x; } 2> /dev/null
echo "the image works: stopped at ${saved[0]##*/} with status 75, and trained to the end from there"
