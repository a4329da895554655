#!/usr/bin/env bash
# Runs a command on this machine where another version of Slurm is installed:
#
#     bash slurm/minicluster/with-slurm.sh 24.11 .venv/bin/python -m pytest tests/slurm -m "not torch and not long"
#
# The version comes from Debian's packages, in a root file system of its own that is made once and kept in the cache
# (`--make` makes it and runs nothing). The command runs there as root, in namespaces of its own: it sees this folder, the
# Python of .venv, and no other process, network or /tmp; what it leaves running ends with it. Needs root, and Debian or
# Ubuntu with mmdebstrap, which it installs. Takes half a minute and about 700 MB for each version. Where it cannot run
# the command, its status is 2, and its last line says why.
set -euo pipefail

cannot() {
    echo "bsl: $1" >&2
    exit 2
}

# Version, and the suites whose packages are used. Slurm of the last suite is pinned.
suites() {
    case "$1" in
    20.11) echo bookworm bullseye ;;
    22.05) echo bookworm ;;
    24.11) echo trixie ;;
    26.05) echo sid ;; # moves on: its version is checked below
    *) cannot "no package of Slurm $1 is known: 20.11, 22.05, 24.11 or 26.05" ;;
    esac
}
packages=slurm-wlm,slurm-client,slurmdbd,mariadb-server,munge,iproute2,util-linux,mount,hostname,procps,python3,shellcheck,git,openssh-client

version=${1:?which version of Slurm}
shift
read -r -a found <<<"$(suites "$version")"
[ "${#found[@]}" -gt 0 ] || exit 2
[ "$(id -u)" -eq 0 ] || cannot "only root can make and enter another root file system"
root=${XDG_CACHE_HOME:-$HOME/.cache}/bigsci-launch/slurm/$version

mirror() { # the one that apt uses here
    # shellcheck disable=SC2016
    apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' | grep -m1 '/debian/$' ||
        cannot "apt has no mirror of Debian here, from which Slurm $version could be installed"
}

make_root() {
    local part="$root.part" lines=() suite from
    command -v mmdebstrap >/dev/null || DEBIAN_FRONTEND=noninteractive apt-get install -y -qq mmdebstrap >&2 ||
        cannot "mmdebstrap, which installs Slurm $version, is not here, and apt could not install it"
    rm -rf "$part"
    from=$(mirror)
    for suite in "${found[@]}"; do lines+=("deb $from $suite main"); done
    local pin="Package: slurm* libslurm* libpmi*\nPin: release n=${found[-1]}\nPin-Priority: 1001\n"
    mmdebstrap --quiet --variant=minbase --mode=root --include="$packages" \
        --keyring=/usr/share/keyrings/debian-archive-keyring.gpg \
        --aptopt='APT::Install-Recommends "false"' --aptopt='Acquire::Check-Valid-Until "false"' \
        --aptopt='Acquire::Retries "0"' --aptopt='Acquire::http::Timeout "10"' \
        --setup-hook="mkdir -p \"\$1/etc/apt/preferences.d\" && printf '$pin' >\"\$1/etc/apt/preferences.d/slurm\"" \
        "${found[0]}" "$part" "${lines[@]}" >&2 || {
        rm -rf "$part"
        cannot "Slurm $version could not be installed from $from"
    }
    rm -rf "$root" && mv "$part" "$root"
}
mkdir -p "$(dirname "$root")"
exec 9>"$root.lock"
flock 9
# One that was made before accounting was among the packages is made again.
[ -x "$root/usr/sbin/mariadbd" ] || make_root
exec 9>&-
# shellcheck disable=SC2016
has=$(dpkg-query --root="$root" --showformat='${Version}' --show slurm-client)
[[ "$has" == "$version".* ]] || cannot "Debian's ${found[-1]} has $has now, not $version; remove $root to make it again"
[ "${1:-}" != --make ] || exit 0
echo "bsl: Slurm $has of Debian, in $root" >&2

base=$("$PWD/.venv/bin/python" -c 'import sys; print(sys.base_prefix)')
# shellcheck disable=SC2016
enter='
set -eu
root=$1 here=$2 base=$3
shift 3
mount --bind "$root" "$root"
mount -t proc proc "$root/proc"
mount --rbind /sys "$root/sys"
mount --rbind /dev "$root/dev"
mount -t tmpfs tmpfs "$root/tmp"
# slurmctld asks for the address of its own host name.
echo "127.0.0.1 localhost $(uname -n)" >"$root/etc/hosts"
mkdir -p "$root$here" "$root$base"
mount --bind "$here" "$root$here"
[ "$base" = /usr ] || mount --bind "$base" "$root$base"
mkdir -p "$root/.outside"
cd "$root" && pivot_root . .outside
umount -l /.outside
ip link set lo up
# slurmctld looks up its address as a machine does that has a network: the loopback interface does not count.
ip link add network type veth peer name other
ip addr add 192.0.2.1/24 dev network
ip link set network up
ip link set other up
cd "$here"
env --default-signal=INT "$@" &
wait $!
'
clean=(env -i HOME=/root TERM="${TERM:-dumb}" LANG=C.UTF-8 CI="${CI:-}" PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin)
exec unshare --mount --pid --net --uts --ipc --fork --kill-child --propagation private \
    "${clean[@]}" bash -c "$enter" with-slurm "$root" "$PWD" "$base" "$@"
