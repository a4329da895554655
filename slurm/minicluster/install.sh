#!/usr/bin/env bash
# Installs what a mini cluster needs (Slurm, munge, iproute2), and shellcheck for the tests. It needs Debian or Ubuntu,
# and root or passwordless sudo. On a terminal it asks first; without one it installs as root, and in CI. If it does not
# install, it says why and exits 1. If nothing is missing, it is quick.
set -euo pipefail

programs=(sbatch slurmctld slurmd munged ip nsenter unshare mount hostname shellcheck)
packages=(slurm-wlm munge iproute2 util-linux mount hostname shellcheck)
PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin

missing=()
for program in "${programs[@]}"; do
    command -v "$program" >/dev/null || missing+=("$program")
done
if [ "${#missing[@]}" -eq 0 ]; then
    exit 0
fi

refuse() {
    echo "bsl: not installed: ${missing[*]}. $1" >&2
    echo "bsl: tests that need a real Slurm will be skipped; to install by hand: apt-get install ${packages[*]}" >&2
    exit 1
}

command -v apt-get >/dev/null || refuse "This script can only use apt-get, which is not on this machine."
if [ "$(id -u)" -eq 0 ]; then
    as_root=()
elif command -v sudo >/dev/null && sudo -n true 2>/dev/null; then
    as_root=(sudo -n)
else
    refuse "You are not root, and sudo does not work without a password."
fi

may_install() {
    local answer
    if [ -t 0 ]; then
        read -r -p "bsl: install ${packages[*]} on this machine? [y/N] " answer && [[ "$answer" == [yY]* ]]
    else
        [ "${#as_root[@]}" -eq 0 ] || [ -n "${CI:-}" ]
    fi
}
may_install || refuse "The installation was not confirmed."

echo "bsl: installing ${packages[*]}" >&2
# Installing the packages does not start slurmctld and slurmd: there is no /etc/slurm/slurm.conf. With systemd running it
# starts munge; a mini cluster has its own munge and leaves that one alone.
install() { "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=120 "$@"; }
install update -qq || echo "bsl: apt-get update failed; trying with the existing package lists" >&2
install install -y -qq --no-install-recommends "${packages[@]}" >&2 || refuse "apt-get install failed."
