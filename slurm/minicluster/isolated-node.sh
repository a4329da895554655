#!/bin/sh
# PID 1 of an isolated node: NAME ADDRESS/PREFIX HOSTS SLURMD. `bsl cluster up` starts it in new pid, mount, uts and
# network namespaces, so nothing it does is visible outside, and everything in the node ends with this process.
set -eu
name=$1 address=$2 hosts=$3 slurmd=$4

mount -t proc proc /proc
hostname "$name"
# Inside the node, node names resolve to their addresses; the machine's own file is not changed.
mount --bind "$hosts" /etc/hosts
ip link set lo up
# The second line on stdin says that the cable to the switch is plugged in.
read -r _
ip address add "$address" dev eth0
ip link set eth0 up
# As PID 1 the shell reaps what jobs leave behind; slurmd would not. The node lives as long as its slurmd.
"$slurmd" -D -N "$name" </dev/null &
wait $!
