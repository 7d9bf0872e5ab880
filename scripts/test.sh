#!/usr/bin/env bash
# Set up and pass the tests.
#
#   bash scripts/test.sh [--all] [--venv DIR] [--torch SPEC] [pytest arguments]
#
#   --all     also the slow tests (minutes each)
# Anything else goes to pytest: bash scripts/test.sh tests/observe -k jsonl
set -euo pipefail
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

VENV="$ROOT/.venv" SETUP=() SELECT=(-m "not slow") ARGS=()
while [ $# -gt 0 ]; do
    case "$1" in
        --all) SELECT=(); shift ;;
        --venv) VENV=$2; SETUP+=(--venv "$2"); shift 2 ;;
        --torch) SETUP+=(--torch "$2"); shift 2 ;;
        -h | --help) usage "$0"; exit 0 ;;
        *) ARGS+=("$1"); shift ;;
    esac
done
bash "$ROOT/scripts/setup.sh" ${SETUP[@]+"${SETUP[@]}"}
case "$VENV" in /*) ;; *) VENV="$PWD/$VENV" ;; esac
# one worker more than cores, since many tests wait for a timeout; at most four
WORKERS=$(($(getconf _NPROCESSORS_ONLN) + 1))
[ "$WORKERS" -le 4 ] || WORKERS=4
cd "$ROOT"
# distributed tests start several processes each: one thread per process, so that they share the cores
export OMP_NUM_THREADS=1 PATH="$VENV/bin:$PATH"
# a test whose processes lost a race on a busy machine gets a second try, and is listed (RERUN)
exec "$VENV/bin/python" -m pytest -q -n "$WORKERS" --dist worksteal --reruns 1 -raR \
    ${SELECT[@]+"${SELECT[@]}"} ${ARGS[@]+"${ARGS[@]}"}
