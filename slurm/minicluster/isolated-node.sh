#!/bin/sh
# PID 1 of an isolated node: NAME ADDRESS/PREFIX HOSTS SLURMD. Started by `bsl cluster up` in fresh pid, mount, uts and
# network namespaces, so nothing that it does is seen outside; all of it ends with this process.
set -eu
name=$1 address=$2 hosts=$3 slurmd=$4

mount -t proc proc /proc
hostname "$name"
# Names of nodes lead to their addresses in here, and the machine's own file stays as it is.
mount --bind "$hosts" /etc/hosts
ip link set lo up
# The second line on stdin: the cable to the switch is plugged in.
read -r _
ip address add "$address" dev eth0
ip link set eth0 up
# As PID 1 the shell reaps what jobs leave behind; slurmd would not. The node lives as long as its slurmd.
"$slurmd" -D -N "$name" </dev/null &
wait $!
