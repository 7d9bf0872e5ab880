#!/usr/bin/env bash
# Build an sdist and a wheel from it, and test the wheel with each Python in a separate new
# environment: the import, the doctor, and three examples, one of them on two ranks.
#
#   bash scripts/test_wheel.sh [--torch SPEC] [PYTHON ...]
#
#   PYTHON          interpreters (default: the installed ones of python3.10 to python3.13)
#   --torch SPEC    requirement for torch (default: the requirement in scripts/setup.sh)
#
# Each run creates new environments in runs/wheels. The log is in the same folder.
set -euo pipefail
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

TORCH=$(sed -n 's/.*default: \(torch==[0-9.]*\);.*/\1/p' "$ROOT/scripts/setup.sh")
PYTHONS=()
while [ $# -gt 0 ]; do
    case "$1" in
        --torch) TORCH=$2; shift 2 ;;
        -h | --help) usage "$0"; exit 0 ;;
        -*) die "unknown option $1; see bash scripts/test_wheel.sh --help" ;;
        *) PYTHONS+=("$1"); shift ;;
    esac
done
there() { "$1" -c 'import sys, venv; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; }

if [ ${#PYTHONS[@]} -eq 0 ]; then
    for name in python3.10 python3.11 python3.12 python3.13; do
        if there "$name"; then PYTHONS+=("$name"); fi
    done
fi
[ ${#PYTHONS[@]} -gt 0 ] || die "no Python 3.10 to 3.13 is on the PATH. Pass interpreters as arguments"
FOLDER="$ROOT/runs/wheels" LOG="$ROOT/runs/wheels/log"
rm -rf "$FOLDER"
mkdir -p "$FOLDER"

try() { # PYTHON: create an environment, and run a user's first steps in an empty folder
    local python=$1 venv name work
    there "$python" || die "$python is not Python 3.10 or newer with venv. Use another interpreter"
    name=$("$python" -c 'import sys; print("Python {}.{}".format(*sys.version_info))')
    venv="$FOLDER/${name#Python }" work="$FOLDER/${name#Python }/work"
    step "$name: environment" "$LOG" "$python" -m venv "$venv"
    step "$name: torch and the wheel" "$LOG" "$venv/bin/python" -m pip install -q "$TORCH" "$WHEEL"
    cp -r "$ROOT/docs/examples" "$work"
    cd "$work"
    step "$name: import" "$LOG" "$venv/bin/python" -c 'import moe_plugin; print(moe_plugin.__file__)'
    step "$name: doctor" "$LOG" "$venv/bin/moe-plugin" doctor
    step "$name: replace_ffn.py and its report" "$LOG" \
        bash -c '"$0/python" replace_ffn.py runs/plain && "$0/moe-plugin" report runs/plain' "$venv/bin"
    step "$name: commands" "$LOG" bash -euc 'cd "$(mktemp -d)"
        "$0" plan --model configs/plans/small.yaml --cluster configs/clusters/a100_ib.yaml --device configs/devices/h100.yaml --nodes 1 --ranks-per-node 2
        for command in schedule recommend calibrate profile-device reshard; do "$0" $command --help; done
        if "$0" bench; then exit 1; fi' "$venv/bin/moe-plugin"
    step "$name: own_router.py" "$LOG" "$venv/bin/python" own_router.py
    step "$name: two_ranks.py" "$LOG" "$venv/bin/torchrun" --standalone --nproc_per_node 2 two_ranks.py
    cd "$ROOT"
}

export OMP_NUM_THREADS=1
unset PYTHONPATH
step "builder" "$LOG" "${PYTHONS[0]}" -m venv "$FOLDER/builder"
step "build" "$LOG" "$FOLDER/builder/bin/python" -m pip install -q build
step "sdist, and the wheel from it" "$LOG" "$FOLDER/builder/bin/python" -m build --outdir "$FOLDER/dist" "$ROOT"
WHEEL=$(echo "$FOLDER"/dist/*.whl)
for python in "${PYTHONS[@]}"; do
    try "$python" || die "$python: see the end of $LOG"
done
say "works with ${PYTHONS[*]}: $(basename "$WHEEL"), $TORCH"
