#!/usr/bin/env bash
# Set up the environment and run the tests.
#
#   bash scripts/test.sh [--fast | --rest | --all] [--venv DIR] [--torch SPEC] [pytest arguments]
#
#   --fast    only the fast tests: some of every package, in about 4 minutes on two cores
#   --rest    the other tests, without the slow tests
#   --all     also the slow tests (minutes each)
# Without pytest arguments the fast tests run first, and the other tests only if the fast tests pass.
# Other arguments are passed to pytest: bash scripts/test.sh tests/observe -k jsonl
set -euo pipefail
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

VENV="$ROOT/.venv" SETUP=() LANE=most ARGS=()
while [ $# -gt 0 ]; do
    case "$1" in
        --fast) LANE=fast; shift ;;
        --rest) LANE=rest; shift ;;
        --all) LANE=all; shift ;;
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
tests() { "$VENV/bin/python" -m pytest -q -n "$WORKERS" --dist worksteal "$@"; }

NOT_SLOW="not slow" REST="not fast and not slow"
if [ "$LANE" = all ]; then NOT_SLOW="" REST="not fast or slow"; fi
if [ "$LANE" = fast ]; then
    tests --fast ${ARGS[@]+"${ARGS[@]}"}
elif [ "$LANE" = rest ]; then
    tests -m "$REST" ${ARGS[@]+"${ARGS[@]}"}
elif [ ${#ARGS[@]} -gt 0 ]; then
    tests -m "$NOT_SLOW" "${ARGS[@]}"
else
    tests --fast
    tests -m "$REST"
fi
