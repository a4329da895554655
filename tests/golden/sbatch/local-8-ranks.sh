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
# As sshd does with keys: nothing runs that another user could have written. A link counts as such.
open_to_others() {
  find "$@" \( ! -uid "$EUID" ! -uid 0 -o -perm /022 \) -print -quit
}

# Whether the group of a folder is the user alone: named as the user, without other members, the first group of no other
# account. Where an access control list names others (`ls` shows a +), the bits of the group hold for them.
is_own_group() {
  local user name members uid gid shown accounts
  user="$(id -un)" && shown="$(ls -ld -- "$2")" && IFS=: read -r name _ _ members <<<"$(getent group "$1")" || return 1
  [ "$name" = "$user" ] && [ "$(id -g "$user")" = "$1" ] && [ "${shown:10:1}" != + ] || return 1
  [ -z "$members" ] || [ "$members" = "$user" ] || return 1
  accounts="$(timeout 5 getent passwd)" || return 1
  while IFS=: read -r name _ uid gid _; do
    [ "$gid" != "$1" ] || [ "$uid" = "$EUID" ] || return 1
  done <<<"$accounts"
}

# Prints a folder above the run in which others may rename, so that they could put a run of theirs in its place: the
# folder of all runs, or one that is ours. A group of the user alone does not count, and nothing below a closed folder.
place_for_others() {
  local folder="${run_dir%/*}" above facts found="" uid gid mode at=0
  above=("${folder:-/}")
  while [ "${above[-1]}" != / ]; do
    folder="${above[-1]%/*}"
    above+=("${folder:-/}")
  done
  facts="$(stat -c '%u %g %a' -- "${above[@]}")" || return 1
  while read -r uid gid mode; do
    folder="${above[at]}" at="$((at + 1))" mode="$((8#$mode))"
    if [ "$uid" = "$EUID" ] && ! ((mode & 0011)); then
      found=""
    elif ((mode & 01000)) || { [ "$at" -gt 1 ] && [ "$uid" != "$EUID" ]; }; then
      continue
    elif ((mode & 0002)) || { ((mode & 0020)) && ! is_own_group "$gid" "$folder"; }; then
      found="${found:-$folder}"
    fi
  done <<<"$facts"
  printf '%s' "$found"
}

# Prints what is not started, and why, unless all that this job runs is still its owner's. It is called right before each
# start: where no other user may rename a folder above, nothing can be exchanged between this look and the start.
own_files() {
  local unsafe place
  if ! unsafe="$(open_to_others "$run_dir" "$run_dir/attempts" "$frozen" "$frozen/config.yaml" "$frozen/script.sh" -maxdepth 0 &&
    open_to_others "$frozen/tools")" || ! place="$(place_for_others)"; then
    say "$1 started: the files of attempt ${frozen##*/} cannot be checked, see above"
  elif [ -n "$unsafe" ]; then
    say "$1 started: another user may have written ${unsafe%%$'\n'*}, which this job would run; inspect it, chmod go-w it, and submit again"
  elif [ -n "$place" ]; then
    say "$1 started: others may rename folders in $place, so its contents may be theirs; chmod +t it, or set run.root to a folder of your own, and submit again"
  else
    return 0
  fi
  return 1
}
own_files "nothing is" || exit 77

cd -- /home/alice/llm

# output reaches the log at once, even if the rank then hangs or is killed
export PYTHONUNBUFFERED=1
# a rank that is killed by SIGSEGV, SIGFPE, SIGABRT or SIGBUS prints its stack first
export PYTHONFAULTHANDLER=1
# many ranks share few cores; more threads per rank would only compete for them
export OMP_NUM_THREADS=1

# monitor.ring: each rank keeps its last calls in a file, where they outlive it. A sitecustomize.py that the runner puts
# first on PYTHONPATH records them; one of your own still runs.
# monitor.watch: detects hangs and spikes, and serves the requests in control/. It leaves when the launcher is gone.
"$host_python" -I -S "$tools/bsl-job.pyz" keep-watch --attempt-dir "$attempt_dir" \
  -- "$host_python" -E "$tools/run_module.py" --path "$host_path" bigsci_launch watch "$run_dir" --agent &

# The launcher replaces this shell, so its PID and exit status are the attempt's. It sets MASTER_ADDR and MASTER_PORT,
# starts one runner per rank with --rank, ends the other ranks when one fails, and writes exit.json.
exec "$host_python" -E "$tools/run_module.py" --path "$host_path" bigsci_launch.scheduler.local \
  --attempt-dir "$attempt_dir" --world-size 8 --exit-reason "$tools/bsl-job.pyz" \
  --lease "$attempt_dir/lease" \
  --wait-s 60 \
  -- "$rank_python" -I -S "$tools/rank_runner.py" \
  --attempt-dir "$attempt_dir" --topology tp=2,pp=2,dp=2 --ranks-per-node 8 \
  --log-limit-mib 256 --ring auto \
  -- "$rank_python" "$tools/run_module.py" bigsci_launch.train
