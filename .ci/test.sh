#!/usr/bin/env bash
# Runs the tests in three processes at once: one computes, one waits for Slurm most of the time, and a short one waits
# for watchers and hangs. The output of the last two is printed when all have ended.
#
#     bash .ci/test.sh .venv/bin/python
set -uo pipefail

python="$1"
options=(--durations=15)
watching=(tests/process/test_{watch,control,check_node,call_trace}.py)
slurm="$(mktemp)" watch="$(mktemp)"
trap 'rm -f -- "$slurm" "$watch"' EXIT

# A shell starts background processes with SIGINT ignored; Ctrl-C must end these too, with what they have started.
env --default-signal=INT "$python" -m pytest tests/slurm tests/train tests/docs "${options[@]}" >"$slurm" 2>&1 &
second=$!
env --default-signal=INT "$python" -m pytest "${watching[@]}" "${options[@]}" >"$watch" 2>&1 &
third=$!
code=0
"$python" -m pytest tests/unit tests/process "${watching[@]/#/--ignore=}" "${options[@]}" || code=$?
wait "$second" || code=$?
wait "$third" || code=$?
cat -- "$watch" "$slurm"
exit "$code"
