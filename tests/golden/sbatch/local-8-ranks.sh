#!/bin/bash
# Run demo, attempt 0001, written by bsl submit --local. Its config is in the same folder.
# 8 ranks as processes on this machine; tp=2,pp=2,dp=2

# shellcheck disable=SC2016,SC2317  # values must not be expanded, and functions are called by traps
# A failing command ends the attempt, and an unset variable is an error.
set -euo pipefail

run_dir='/home/alice/runs/my run'
attempt_dir='/home/alice/runs/my run/attempts/0001'
tools="$attempt_dir/tools"
host_python=/opt/bsl/bin/python
# Where that Python, which is bsl's own, has packages from. What follows may set PYTHONPATH for the one of the ranks.
host_path="${PYTHONPATH:-}"
rank_python=/opt/bsl/bin/python

# The output may be on a disk that is full: that must not change how the attempt ends.
say() {
  TZ=UTC0 printf '%(%Y-%m-%dT%H:%M:%SZ)T bsl: %s\n' -1 "$*" || true
}

frozen="$attempt_dir"
# As sshd does with keys: nothing runs that somebody else could have written. A link counts as such.
open_to_others() {
  find "$@" \( ! -uid "$EUID" ! -uid 0 -o -perm /022 \) -print -quit
}
if ! unsafe="$(open_to_others "$run_dir" "$run_dir/attempts" "$frozen" "$frozen/config.yaml" "$frozen/script.sh" -maxdepth 0 &&
  open_to_others "$frozen/tools")"; then
  say "nothing is started: the files of attempt 0001 cannot be checked, see above"
  exit 77
elif [ -n "$unsafe" ]; then
  say "nothing is started: somebody else may have written ${unsafe%%$'\n'*}, which this job would run; look what is in it, chmod go-w it, and submit again"
  exit 77
fi

cd -- /home/alice/llm

# output reaches the log at once, even if the rank then hangs or is killed
export PYTHONUNBUFFERED=1
# a rank that is killed by SIGSEGV, SIGFPE, SIGABRT or SIGBUS prints its stack first
export PYTHONFAULTHANDLER=1
# many ranks share few cores; more threads per rank would only compete for them
export OMP_NUM_THREADS=1

# monitor.ring: each rank keeps its last calls in a file, where they outlive it. A sitecustomize.py that the runner puts
# first on PYTHONPATH records them; one of your own still runs.
# monitor.watch: notices hangs and spikes, and serves what people ask in control/. It leaves when the launcher is gone.
"$host_python" -I -S "$tools/keep_watch.py" --attempt-dir "$attempt_dir" \
  -- "$host_python" -E "$tools/run_module.py" --path "$host_path" bigsci_launch watch "$run_dir" --agent &

# The launcher replaces this shell, so its PID and exit status are the attempt's. It sets MASTER_ADDR and MASTER_PORT,
# starts one runner per rank with --rank, ends the other ranks when one fails, and writes exit.json.
exec "$host_python" -E "$tools/run_module.py" --path "$host_path" bigsci_launch.scheduler.local \
  --attempt-dir "$attempt_dir" --world-size 8 --exit-reason "$tools/exit_reason.py" \
  --lease "$attempt_dir/lease" \
  --wait-s 60 \
  -- "$rank_python" -I -S "$tools/rank_runner.py" \
  --attempt-dir "$attempt_dir" --topology tp=2,pp=2,dp=2 --ranks-per-node 8 \
  --log-limit-mib 256 --ring auto \
  -- "$rank_python" "$tools/run_module.py" bigsci_launch.train
