#!/usr/bin/env bash
# Makes .venv from a fully pinned list: `infra/setup.sh PYTHON LOCK` (the Makefile calls it).
#
# --no-deps: the list is the whole closure. vLLM's CPU build declares a torchvision that breaks
# `import transformers` beside this torch, so nothing may be added to the list by a resolver.
set -euo pipefail
python=$1
lock=$2

command -v "$python" >/dev/null || python=python3
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
if [ "$version" != 3.11 ]; then
    echo "setup: Python 3.11 is needed, $python is $version; run: make setup PYTHON=/path/to/python3.11" >&2
    exit 1
fi
[ -x .venv/bin/python ] || "$python" -m venv .venv

torch=$(grep -E '^torch==' "$lock")
index=()
if ! .venv/bin/python -m pip install --dry-run --no-deps --quiet "$torch" 2>/dev/null; then
    echo "setup: the configured package sources lack $torch; adding PyTorch's own CPU wheel index"
    index=(--extra-index-url https://download.pytorch.org/whl/cpu)
fi
.venv/bin/python -m pip install --no-deps --quiet "${index[@]}" -r "$lock"
# The project itself, so that its packages and its vLLM plug-in entry point are found anywhere.
.venv/bin/python -m pip install --no-deps --no-build-isolation --quiet --editable .
# Else the first step of the first run would wait for the compiler.
.venv/bin/python -m tasks.weights compile
echo "setup: .venv is ready ($(.venv/bin/python -c 'import torch; print("torch", torch.__version__)'))"
