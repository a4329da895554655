#!/bin/bash
# start_all.sh PORT RANKS COMMAND...
export MASTER_ADDR=127.0.0.1 MASTER_PORT=$1 WORLD_SIZE=$2
shift 2
for ((i = 0; i < WORLD_SIZE; i++)); do
    RANK=$i LOCAL_RANK=$i "$@" &
done
wait
