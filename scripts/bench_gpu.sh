#!/usr/bin/env bash
# Check and measure the layer, the kernels, every operation and every installed peer on a machine
# with one GPU, Python, torch and Triton. Each step is a separate process with a time limit, and its
# output is written to OUT/gpu_logs. If a step fails or exceeds its limit, the other steps still run.
# The page OUT/gpu.md is updated after each step.
#
#   [STEPS="layer checks operations peers"] bash scripts/bench_gpu.sh [OUT [OPTION ...]]
#
# OUT: folder of the page and its JSON file (default: docs/benchmarks). Existing parts are retained.
# OPTION: options of `moe-plugin bench gpu`. STEPS: the steps to run, if the GPU is available only
# for minutes.
set -uo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
OUT=${1:-docs/benchmarks}
OPTIONS=("${@:2}")
export OUT LOGS="$OUT/gpu_logs" PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
python3 -c 'import importlib.util as u, sys
missing = [name for name in ("torch", "triton") if u.find_spec(name) is None]
sys.exit("bench_gpu.sh needs " + " and ".join(missing) if missing else 0)' || exit 2
mkdir -p "$LOGS" || exit 2
: > "$LOGS/steps.txt"

step() { # NAME SECONDS COMMAND ...
    local name=$1 limit=$2 status=0 said=passed
    timeout -k 10 "$limit" "${@:3}" > "$LOGS/$name.log" 2>&1 || status=$?
    case $status in
        0) ;;
        124 | 137) said="over its limit of $limit s" ;;
        *) said="failed with status $status" ;;
    esac
    echo "$name: $said" | tee -a "$LOGS/steps.txt"
    return "$status"
}
export -f step

told() { # write the page with the results of the steps
    python3 -m moe_plugin.cli.main bench gpu --parts steps --out "$OUT" > /dev/null
}

told_once() { # one process at a time writes the page for all steps that have ended
    local ended
    exec 9> "$LOGS/told" && flock 9
    ended=$(wc -l < "$LOGS/steps.txt")
    [ "$ended" -le "$(wc -l < "$LOGS/told.txt")" ] || {
        told
        head -n "$ended" "$LOGS/steps.txt" > "$LOGS/told.txt"
    }
}
export -f told told_once

page() { # PART SECONDS: measure a part of the page, and write the page
    step "$1" "$2" python3 -m moe_plugin.cli.main bench gpu --parts "$1" --rounds 10 \
        --attempts 1 --out "$OUT" "${OPTIONS[@]}" || told
}

layer() { for n in 0 1 2; do page "layer_$n" 180; done; }
operations() { for n in 0 1 2; do page "operations_$n" 180; done; }
peers() { for n in 0 1 2; do page "peers_$n" 300; done; }

checks() { # one process per operation, because compiling takes longer than running
    local workers=$(($(getconf _NPROCESSORS_ONLN) * 3 / 4))
    [ "$workers" -ge 1 ] || workers=1
    [ "$workers" -le 12 ] || workers=12
    : > "$LOGS/told.txt"
    step checks 60 python3 -m tests.kernels.on_gpu --list || told
    grep -x '[a-z0-9_]*' "$LOGS/checks.log" | xargs -P "$workers" -I{} bash -c \
        'step check_{} 240 python3 -m tests.kernels.on_gpu --quick {}; told_once'
}

for name in ${STEPS:-layer checks operations peers}; do "$name"; done
told
! grep -qv ': passed$' "$LOGS/steps.txt"
