#!/bin/bash
# Starts four ranks in one of several ways: run_four.sh WAY PORT PYTHON PROGRAM...
#   plain     `&` and `wait`              wrapped   each rank below a wrapper script
#   shell     each rank below `bash -c`   detached  each rank below `setsid nohup`; the shell stays
#   backwards rank 3 first                split     two shells, of which one is this; ranks 2 and 3 are in the other
#   absent    rank 3 is never started     bound     each rank below `taskset`, of which nothing is left
way=$1 port=$2
shift 2
export MASTER_ADDR=127.0.0.1 MASTER_PORT=$port WORLD_SIZE=4
ranks="0 1 2 3"
[ "$way" = backwards ] && ranks="3 2 1 0"
[ "$way" = absent ] && ranks="0 1 2"
[ "$way" = split ] && ranks="0 1"
if [ "$way" = split ]; then
    (setsid bash -c 'for RANK in 2 3; do export RANK; "$@" & done; wait; true' other "$@" &)
fi
for rank in $ranks; do
    export RANK=$rank
    case $way in
        wrapped) bash "$(dirname "$0")/profile_rank.sh" "$@" & ;;
        shell) bash -c "$* ; echo ended" & ;;
        detached) setsid nohup "$@" & ;;
        bound) taskset -c 0,1 "$@" & ;;
        *) "$@" & ;;
    esac
done
wait
sleep 100000
