#!/usr/bin/env bash
# On a machine with one GPU and nothing but Python, torch and Triton: the kernels' checks there, then the layer, every installed peer
# and every operation. One page, OUT/gpu.md, in under 8 minutes.
#
#   bash scripts/bench_gpu.sh [OUT]        OUT: where the page and its JSON go (default: docs/benchmarks)
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
OUT=${1:-docs/benchmarks}
mkdir -p "$OUT"
CHECKS=$(mktemp)
trap 'rm -f "$CHECKS"' EXIT
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
WORKERS=$(($(getconf _NPROCESSORS_ONLN) / 2))
[ "$WORKERS" -ge 1 ] || WORKERS=1
[ "$WORKERS" -le 8 ] || WORKERS=8
# compiling takes the time, not the GPU: one process an operation
python3 -m tests.kernels.on_gpu --list |
    timeout 240 xargs -P "$WORKERS" -n 1 python3 -m tests.kernels.on_gpu --quick | tee "$CHECKS"
timeout 240 python3 -m moe_plugin.cli.main bench gpu --device cuda --rounds 10 --attempts 1 --checks "$CHECKS" --out "$OUT"
