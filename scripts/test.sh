#!/usr/bin/env bash
# Set up the environment and run the tests.
#
#   bash scripts/test.sh [--most | --all] [--venv DIR] [--torch SPEC] [pytest arguments]
#
#   (neither)  the tests that find most faults, in about 6 minutes on two cores: exactness in few
#              cells, every published system, both hosts on two ranks, checkpoints, the command line
#              and the documentation
#   --most     all tests except the slow ones: about 25 minutes (CI)
#   --all      all tests
# Other arguments are passed to pytest, and select among all tests except the slow ones:
# bash scripts/test.sh tests/observe -k jsonl
set -euo pipefail
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

VENV="$ROOT/.venv" SETUP=() LANE=fast ARGS=()
while [ $# -gt 0 ]; do
    case "$1" in
        --most | --all) LANE=${1#--}; shift ;;
        --venv) VENV=$2; SETUP+=(--venv "$2"); shift 2 ;;
        --torch) SETUP+=(--torch "$2"); shift 2 ;;
        -h | --help) usage "$0"; exit 0 ;;
        *) ARGS+=("$1"); shift ;;
    esac
done
bash "$ROOT/scripts/setup.sh" ${SETUP[@]+"${SETUP[@]}"}
case "$VENV" in /*) ;; *) VENV="$PWD/$VENV" ;; esac
# two workers more than cores, because many tests wait for other processes; at most four
WORKERS=$(($(getconf _NPROCESSORS_ONLN) + 2))
[ "$WORKERS" -le 4 ] || WORKERS=4
cd "$ROOT"
# one thread per process, because distributed tests start several processes that share the cores
export OMP_NUM_THREADS=1 PATH="$VENV/bin:$PATH"
unset PYTHONDONTWRITEBYTECODE  # hundreds of processes would compile the package's modules again
if [ "$LANE" = fast ]; then
    if [ ${#ARGS[@]} -eq 0 ]; then ARGS=(--fast); else LANE=most; fi
fi
[ "$LANE" != most ] || ARGS=(-m "not slow" ${ARGS[@]+"${ARGS[@]}"})
exec "$VENV/bin/python" -m pytest -q -n "$WORKERS" --dist worksteal ${ARGS[@]+"${ARGS[@]}"}
