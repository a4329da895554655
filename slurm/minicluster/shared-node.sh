#!/bin/sh
# One of several slurmds on this host: NAME HOSTS SLURMD. Started by `bsl cluster up` without --isolated.
set -eu
name=$1 hosts=$2 slurmd=$3

# Ranks find the first node of their job by its name. If mounting is allowed (to root), jobs see a hosts file in which
# every node is 127.0.0.1; the machine's own file is not changed. Otherwise the script of `bsl submit` asks Slurm for the
# address, and other jobs must set MASTER_ADDR themselves.
# shellcheck disable=SC2016  # the inner shell expands these
if unshare --mount mount --bind "$hosts" /etc/hosts 2>/dev/null; then
    exec unshare --mount /bin/sh -c 'mount --bind "$1" /etc/hosts && exec "$2" -D -N "$3"' sh "$hosts" "$slurmd" "$name"
fi
exec "$slurmd" -D -N "$name"
