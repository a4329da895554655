#!/usr/bin/env bash
# Runs the tests in two processes at once: one computes, the other waits for Slurm most of the time. The output of the
# second one is printed when both have ended.
#
#     bash .ci/test.sh .venv/bin/python
set -uo pipefail

python="$1"
options=(--durations=15)
waiting="$(mktemp)"
trap 'rm -f -- "$waiting"' EXIT

# A shell starts background processes with SIGINT ignored; Ctrl-C must end this one too, with what it has started.
env --default-signal=INT "$python" -m pytest tests/slurm tests/train tests/docs "${options[@]}" >"$waiting" 2>&1 &
second=$!
code=0
"$python" -m pytest tests/unit tests/process "${options[@]}" || code=$?
wait "$second" || code=$?
cat -- "$waiting"
exit "$code"
