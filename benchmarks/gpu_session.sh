#!/usr/bin/env bash
# What one card shows of bsl in ten minutes: needs no network, no virtual environment and no installation.
#
#     bash benchmarks/gpu_session.sh OUT [--only PHASE ...] [--tiny]
#
# It takes the python3 that is there, or that of PYTHON, which must have torch, and the wheels that
# benchmarks/gpu_wheels.sh has put into .whl/ for Python 3.12, if there are any. Each phase leaves OUT/PHASE.json and OUT/PHASE.log.
# Without a GPU everything runs on the CPU in tiny sizes, as a test of itself.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}
path="$root:$root/benchmarks"
if compgen -G "$root/.whl/*.whl" >/dev/null && "$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))'; then
    site=$(mktemp -d)
    trap 'rm -rf -- "$site"' EXIT
    "$python" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --disable-pip-version-check \
        --root-user-action ignore --target "$site" "$root"/.whl/*.whl
    path="$site:$path"
    # pip --target puts programs, py-spy among them, below the folder.
    export PATH="$site/bin:$PATH"
fi
export PYTHONPATH="$path${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 DS_BUILD_OPS=0
"$python" "$root/benchmarks/gpu_session.py" "$@"
