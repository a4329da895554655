#!/bin/bash
# Starts one process of a program for each number: start_processes.sh N PORT argument|variable COMMAND...
count=$1 port=$2 way=$3
shift 3
for ((number = 0; number < count; number++)); do
    if [ "$way" = argument ]; then
        "$@" --process-id "$number" --coordinator "127.0.0.1:$port" &
    else
        JAX_PROCESS_ID=$number "$@" --coordinator "127.0.0.1:$port" &
    fi
done
wait
