#!/usr/bin/env bash
# Makes the development environment: setup-python.sh PYTHON VENV
# Pins come from constraints.txt. Where no GPU is visible, the CPU build of torch is taken if pip can find one
# (PIP_FIND_LINKS and PIP_EXTRA_INDEX_URL are honoured); the general build, several GB larger, is the fall-back.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1 venv=$2

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
    echo "error: $python is older than Python 3.10; name another: make PYTHON=python3.11 ..." >&2
    exit 2
}
"$python" -m venv "$venv" || {
    echo "hint: Debian keeps venv in a package of its own: apt-get install python3-venv" >&2
    exit 2
}
# It takes minutes: whoever waits at a terminal sees what is downloaded; a log only has the lines below.
talk=--quiet
[ ! -t 1 ] || talk=--progress-bar=on
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$1" "$talk" --constraint constraints.txt "${@:2}"; }

torch=$(sed -n 's/^torch==\([0-9.]*\).*/\1/p' constraints.txt)
echo "bsl: installing torch $torch; with the rest, it takes some minutes" >&2
if [ -e /dev/nvidiactl ] || ! pip install "torch==$torch+cpu" 2>/dev/null; then
    pip install "torch==$torch"
fi
echo "bsl: installing deepspeed (without compiled ops) and the rest" >&2
DS_BUILD_OPS=0 pip install --editable ".[train,weights,mcp,top,dev,docs]"
