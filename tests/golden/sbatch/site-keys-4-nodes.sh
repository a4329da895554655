#!/bin/bash
# Run prepared, attempt 0001, written by bsl submit. Its config is in the same folder.
# 16 ranks = 4 nodes x 4 on site rack; tp=8,pp=1,dp=2
#SBATCH --job-name=prepared
# lets bsl status --jobid find the run directory
#SBATCH --comment=bsl:/home/alice/runs/my%20run
#SBATCH --chdir=/home/alice/llm
#SBATCH --output="/home/alice/runs/my run/attempts/0001/job.out"
# a requeued job continues in the same file
#SBATCH --open-mode=append
#SBATCH --nodes=4
# one task per GPU: each task is a rank
#SBATCH --ntasks-per-node=4
#SBATCH --time=08:00:00
# 420 s = 2 x (step 120 s + save 60 s) + slack 60 s
#SBATCH --signal=B:USR2@420
# slurm.requeue is false: a job that loses a node ends, and you decide whether to submit it again
#SBATCH --no-requeue
# tp 8 is 2 nodes of 4 ranks: each group stays in one NVLink domain
#SBATCH --segment=2
#SBATCH --gpus-per-node=4
#SBATCH --mail-type=END,FAIL
#SBATCH --mem=400G

# shellcheck disable=SC2016,SC2317  # values must not be expanded, and functions are called by traps
# A failing command ends the job, an unset variable is an error, and a pipe fails if any command in it fails.
set -euo pipefail

run_dir='/home/alice/runs/my run'
first_attempt=0001
host_python=/opt/bsl/bin/python
rank_python=python3

# The output may be on a disk that is full: that must not change how the job ends.
say() {
  TZ=UTC0 printf '%(%Y-%m-%dT%H:%M:%SZ)T bsl: %s\n' -1 "$*" || true
}

frozen="$run_dir/attempts/$first_attempt"
# The program of this script, as it was at submission. Only the standard library is there for it.
job_program=("$host_python" -I -S "$frozen/tools/bsl-job.pyz")

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

# Two jobs of one run would train at once and write the same files. sbatch may submit a job without an answer, and users
# submit scripts by hand. So a job ends here if job.json names another one, or names none and a later attempt was made.
owner="$(sed -n 's/^ *"job_id": "\(.*\)",*$/\1/p' "$frozen/job.json" 2>/dev/null || true)"
if [ -z "$owner" ]; then
  for other in "$run_dir"/attempts/[0-9]*; do
    other="${other##*/}"
    # Only a number: bash would execute what another name has in brackets.
    [[ "${other%%.*}" =~ ^[0-9]+$ ]] || continue
    [ "$((10#${other%%.*}))" -le "$((10#$first_attempt))" ] || owner="that of attempt $other"
  done
fi
if [ -n "$owner" ] && [ "$owner" != "$SLURM_JOB_ID" ]; then
  say "job $SLURM_JOB_ID starts nothing: the job of attempt $first_attempt is $owner"
  exit 1
fi

attempt="$first_attempt"
restarts="${SLURM_RESTART_COUNT:-0}"
if [ "$restarts" -gt 0 ]; then
  # Slurm requeued the job. This start is an attempt of its own, with the same frozen files.
  attempt="$first_attempt.r$restarts"
  (umask go-w && mkdir -p -- "$run_dir/attempts/$attempt"/{,pids,logs,events,errors,exits})
  cp -rp -- "$frozen"/*.json "$frozen"/{config.yaml,script.sh,requests} "$run_dir/attempts/$attempt/"
  rm -f -- "$run_dir/attempts/$attempt"/{exit,next,bad_nodes,ended}.json
fi
attempt_dir="$run_dir/attempts/$attempt"
rm -f -- "$attempt_dir/queued"
started="$(date +%s)"
facts=(--restart-count "$restarts")
told_at=""

# Writes exit.json: why the attempt ended, and the first rank and node that failed. Prints the training's exit code.
conclude() {
  own_files "the program that writes exit.json is not" >&2 || return 0
  "${job_program[@]}" exit-reason --attempt-dir "$attempt_dir" \
    --world-size 16 --job-id "$SLURM_JOB_ID" --started "$started" \
    "${facts[@]}" "$@" || say "exit.json could not be written" >&2
  # Nodes that this end has shown to be bad are left out of later attempts.
  "${job_program[@]}" bad-nodes --attempt-dir "$attempt_dir" --job-id "$SLURM_JOB_ID" "${facts[@]}" || true
}

# With grace time, Slurm ends only the ranks when it takes the nodes for another job, and they may end well.
ask_preemption() {
  facts+=(--preempted "$(timeout 5 squeue --noheader --states=all --jobs="$SLURM_JOB_ID" --Format=PreemptTime | tr -d ' ' || true)")
}

on_exit() {
  local code="$?" told
  trap '' TERM USR2
  ask_preemption
  # srun's status is the highest of all ranks, including those that it killed because another had failed.
  told="$(conclude --exit-code "$code")"
  [[ "$told" =~ ^[0-9]+$ ]] && code="$told"
  say "end attempt=$attempt job=$SLURM_JOB_ID restart=$restarts exit_code=$code"
  exit "$code"
}

# Seconds since the host booted: unlike its clock, this never jumps.
uptime_s() {
  local seconds
  read -r seconds _ </proc/uptime
  echo "${seconds%%.*}"
}

# The time limit is near: ranks save at the next step and exit with 0. Slurm signals every process of a job step, and
# SIGTERM would kill those that do not handle it. So the step gets SIGURG, and each rank runner turns it into
# SIGTERM for its own program only.
on_time_limit_near() {
  say "the time limit is near: asking ranks to save and stop"
  facts+=(--stop-requested)
  told_at="$(uptime_s)"
  scancel --signal=URG "$SLURM_JOB_ID" || say "the ranks could not be signalled"
}

# Slurm is ending the job and will also kill this script after KillWait: record now what is known. squeue still has the
# reason.
on_termination() {
  local known reason slurm_restarts lost
  trap '' TERM USR2
  say "terminated by Slurm"
  known="$(timeout 5 squeue --noheader --states=all --jobs="$SLURM_JOB_ID" --Format=Reason,RestartCnt || true)"
  read -r reason slurm_restarts _ <<<"$known" || true
  lost="$(timeout 5 sinfo --noheader --Node --nodes="$SLURM_JOB_NODELIST" --states=down --format=%N || true)"
  ask_preemption
  [ -z "$told_at" ] || facts+=(--warned-before-s "$(($(uptime_s) - told_at))")
  facts+=(--terminated "$(date +%s)" --lost-nodes "$lost" --slurm-reason "${reason:-}" --slurm-restarts "${slurm_restarts:-0}")
  conclude
}

trap on_exit EXIT
trap on_time_limit_near USR2
trap on_termination TERM

say "start attempt=$attempt job=$SLURM_JOB_ID restart=$restarts nodes=$SLURM_JOB_NODELIST"

# output reaches the log at once, even if the rank then hangs or is killed
export PYTHONUNBUFFERED=1
# a rank that is killed by SIGSEGV, SIGFPE, SIGABRT or SIGBUS prints its stack first
export PYTHONFAULTHANDLER=1

# Limits of the ranks; srun passes them on (--propagate). A node that refuses one ends the job here, with the reason.
ulimit -S -c 0 || { echo "cannot set ulimits.core to 0: the node's hard limit is $(ulimit -H -c)" >&2; exit 1; }
ulimit -S -l unlimited || { echo "cannot set ulimits.memlock to unlimited: the node's hard limit is $(ulimit -H -l)" >&2; exit 1; }
ulimit -S -n 65536 || { echo "cannot set ulimits.nofile to 65536: the node's hard limit is $(ulimit -H -n)" >&2; exit 1; }

# Files for the disk of every node. sbcast names the node that cannot take one, and that ends the job. The one of Slurm
# 20.11 exits with 0 even so.
stage_in() {
  local said to="${2//%j/$SLURM_JOB_ID}"
  to="${to//%u/$(id -un)}"
  say "copying $1 to $to on every node"
  if ! said="$(sbcast --force --preserve -- "$1" "$to" 2>&1)" || [[ "$said" == *"REQUEST_FILE_BCAST("* ]]; then
    printf '%s\n' "$said" >&2
    echo "stage-in failed: $1 could not be copied to $to on every node: is a disk full, or a folder missing?" >&2
    exit 1
  fi
}
stage_in /shared/train.sif /local/train.sif

# The ranks rendezvous on the first host, which is this one. The port is below the ephemeral range (32768 and up), where
# another connection could be using it. It is derived from the job ID, so that two jobs on one node use different ports.
# If it is in use already, another one is taken, and the output says which and why.
hosts="$(scontrol show hostnames "$SLURM_JOB_NODELIST")"
export MASTER_ADDR="${hosts%%$'\n'*}"i
own_files "nothing is" || exit 77
derived_port="$((10000 + SLURM_JOB_ID % 20000))"
MASTER_PORT="$("${job_program[@]}" free-port "$derived_port")" || MASTER_PORT="$derived_port"
export MASTER_PORT
say "rendezvous at $MASTER_ADDR:$MASTER_PORT"

step_options=(
  # a dead rank ends the step, since the others would wait for it in a collective until the time limit
  --kill-on-bad-exit=1
  # ranks fill one node after another; coordinates and LOCAL_RANK depend on it
  --distribution=block
  # ranks find each other through MASTER_ADDR; MPI's start-up would only slow the step down
  --mpi=none
  # ranks get what this script exports, whatever the site's default is
  --export=ALL
  # srun's own messages name the task that they are about
  --label
  # slurm.wait_s: ranks that still run 60 s after the first one has ended with 0 are hung: end them
  --wait=60
  # site.cpu_bind: the CPUs of each rank of a node
  '--cpu-bind=mask_cpu:fe,fe00,fe0000,fe000000'
  # ulimits: ranks get the limits that this script has set
  '--propagate=CORE,MEMLOCK,NOFILE'
  --gpu-bind=none
)
# monitor.ring: each rank keeps its last calls in a file on its node, where they outlive it. A sitecustomize.py that the
# runner puts first on PYTHONPATH records them; one of your own still runs.
# The check and the files for the nodes took their time.
own_files "nothing is" || exit 77
# The runner sets RANK, LOCAL_RANK and WORLD_SIZE inside the step: this shell runs once per job, not once per rank.
srun "${step_options[@]}" singularity exec --no-home --rocm --bind=/home/alice/llm:/home/alice/llm '--bind=/home/alice/runs/my run:/home/alice/runs/my run' --pwd=/home/alice/llm /local/train.sif "$rank_python" -I -S "$frozen/tools/rank_runner.py" \
  --attempt-dir "$attempt_dir" --topology tp=8,pp=1,dp=2 --ranks-per-node 4 \
  --stop-signal TERM \
  --log-limit-mib 256 --ring auto \
  -- python pretrain_gpt.py --exit-signal-handler &
step=$!

# A signal interrupts `wait` with status 128 + signal, so wait again while srun is alive. Its status is then the job's.
while true; do
  code=0
  wait "$step" || code=$?
  kill -0 "$step" 2>/dev/null || break
done
code=0
wait "$step" || code=$?
exit "$code"
