#!/usr/bin/env bash
# Fills .whl/ with what a bare machine with a GPU lacks, for benchmarks/gpu_session.sh.
#
#     bash benchmarks/gpu_wheels.sh
#
# Such a machine has Python 3.12 with torch, triton, pytest, safetensors, tokenizers, numpy, xxhash, click, rich, jinja2
# and PyYAML. Versions come from constraints.txt. DeepSpeed publishes no wheel: a pure one, without compiled operators,
# is built here. torchtitan and what only it needs, for the phase `peer`, are pinned here: 0.2.2 is its last release for
# torch 2.11. Its pyarrow, pandas, httpx and tensorboard are there.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
mkdir -p .whl
rm -f .whl/*.whl
pip() { "$python" -m pip --quiet --disable-pip-version-check "$@"; }
pinned() { grep -i -m1 "^$1==" constraints.txt; }

platforms=()
for number in 35 34 28 24 17; do platforms+=(--platform "manylinux_2_${number}_x86_64"); done
platforms+=(--platform manylinux2014_x86_64 --platform manylinux1_x86_64)
download() {
    pip download --no-deps --only-binary=:all: --python-version 3.12 --implementation cp "${platforms[@]}" -d .whl "$@"
}
for name in py-spy pydantic pydantic_core annotated-types typing-inspection typing_extensions hjson einops msgpack \
    py-cpuinfo psutil; do
    download "$(pinned "$name")"
done
download torchtitan==0.2.2 torchdata==0.11.0 datasets==4.8.5 dill==0.4.1 multiprocess==0.70.19 tyro==1.0.17 \
    docstring_parser==0.18.0 typeguard==4.6.1
# setup.py of DeepSpeed imports torch, to see what it could compile: the environment that builds it must have it.
DS_BUILD_OPS=0 pip wheel --no-deps --no-build-isolation -w .whl "$(pinned deepspeed)"
du -sh .whl
