#!/usr/bin/env bash
# Runs the tests in three processes at once: one computes, one waits for Slurm most of the time, and a short one takes
# from both so that they end together. The output of the last two is printed when all have ended.
#
#     bash .ci/test.sh .venv/bin/python
set -uo pipefail

python="$1"
options=(--durations=15)
# A shell starts background processes with SIGINT ignored; Ctrl-C must end these too, with what they have started.
behind=(env --default-signal=INT "$python" -m pytest)
taken=(tests/process/test_{watch,control,check_node,call_trace}.py tests/train/test_{attach_loops,micro_batch_auto}.py)
others=("${taken[@]/#/--ignore=}")
slurm="$(mktemp)" short="$(mktemp)"
trap 'rm -f -- "$slurm" "$short"' EXIT

"${behind[@]}" tests/slurm tests/train tests/docs "${others[@]}" "${options[@]}" >"$slurm" 2>&1 &
second=$!
"${behind[@]}" "${taken[@]}" "${options[@]}" >"$short" 2>&1 &
third=$!
code=0
"$python" -m pytest tests/unit tests/process "${others[@]}" "${options[@]}" || code=$?
wait "$second" || code=$?
wait "$third" || code=$?
cat -- "$short" "$slurm"
exit "$code"
