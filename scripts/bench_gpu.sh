#!/usr/bin/env bash
# On a machine with a GPU and nothing but Python, torch and Triton: tests of the kernels there, then the GPU's benchmarks.
#
#   bash scripts/bench_gpu.sh [OUT]        OUT: where tables, JSON and plots go (default: docs/benchmarks)
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
OUT=${1:-docs/benchmarks}
mkdir -p "$OUT"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
python3 -m tests.kernels.on_gpu 2>&1 | tee "$OUT/checks_gpu.txt"
exec python3 -m moe_plugin.bench.suite --device cuda --out "$OUT"
