#!/usr/bin/env bash
# Runs the suite for GPUs and prints one table: what was checked and measured, with its limits.
#
#     benchmarks/gpu.sh [--data-dir DIR] [--quick] [--json FILE] [--kind KIND]
#
# With --data-dir, the folder of CIFAR-10's official files, MobileNetV2 is trained on CIFAR-10, else
# on scikit-learn's digits. Makes .venv first (see bin/setup); for another one, activate it and run
# `python benchmarks/gpu.py`. Exit code 1 if anything failed.
set -euo pipefail
here=$PWD
folder=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
if [ -z "${VIRTUAL_ENV:-}" ]; then
    source "$folder/../bin/setup"
    cd "$here"
fi
exec python "$folder/gpu.py" "$@"
