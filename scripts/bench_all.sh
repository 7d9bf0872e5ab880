#!/usr/bin/env bash
# Measure layers, operations and scaling for docs/benchmarks, on this machine. Minutes; keep the machine quiet meanwhile.
#
#   bash scripts/bench_all.sh [--venv DIR] [options of `moe-plugin bench layers`]
#
#   --venv DIR       the environment (default: .venv in the repository)
#   --only STUDIES   names of `moe-plugin bench`, with commas (default: layers,operations,scaling)
#   --out DIR        where to write (default: docs/benchmarks)
set -euo pipefail
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

VENV="$ROOT/.venv" ONLY=layers,operations,scaling OUT=docs/benchmarks ARGS=()
while [ $# -gt 0 ]; do
    case "$1" in
        --venv) VENV=$2; shift 2 ;;
        --only) ONLY=$2; shift 2 ;;
        --out) OUT=$2; shift 2 ;;
        -h | --help) usage "$0"; exit 0 ;;
        *) ARGS+=("$1"); shift ;;
    esac
done
[ -x "$VENV/bin/python" ] || die "no environment in $VENV; run: bash scripts/setup.sh"
cd "$ROOT"
for STUDY in ${ONLY//,/ }; do
    "$VENV/bin/python" -m moe_plugin.cli.main bench "$STUDY" --out "$OUT" ${ARGS[@]+"${ARGS[@]}"}
done
