#!/usr/bin/env bash
# Measure everything that docs/benchmarks holds, on this machine. Minutes; keep the machine quiet meanwhile.
#
#   bash scripts/bench_all.sh [--venv DIR] [options of moe_plugin.lab.bench.suite]
#
#   --venv DIR       the environment (default: .venv in the repository)
#   --only PARTS     layer, kernels, scaling, with commas (default: all)
#   --device DEVICE  cpu or cuda (default: cuda where there is one; its files end in _gpu)
#   --out DIR        where to write (default: docs/benchmarks)
set -euo pipefail
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

VENV="$ROOT/.venv" ARGS=()
while [ $# -gt 0 ]; do
    case "$1" in
        --venv) VENV=$2; shift 2 ;;
        -h | --help) usage "$0"; exit 0 ;;
        *) ARGS+=("$1"); shift ;;
    esac
done
[ -x "$VENV/bin/python" ] || die "no environment in $VENV; run: bash scripts/setup.sh"
cd "$ROOT"
exec "$VENV/bin/python" -m moe_plugin.lab.bench.suite ${ARGS[@]+"${ARGS[@]}"}
