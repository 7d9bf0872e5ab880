# Shared by the scripts in this folder: the repository's root, messages, and steps that log.
# shellcheck shell=bash

ROOT="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)"
STEP_PID=""
trap 'if [ -n "$STEP_PID" ]; then kill "$STEP_PID" 2>/dev/null; fi; echo; exit 130' INT TERM

say() { printf '%s\n' "$*"; }

# die MESSAGE: what went wrong and what to do about it.
die() {
    printf '\nerror: %s\n' "$*" >&2
    exit 1
}

# usage SCRIPT: the comment block at the top of a script, as its help.
usage() { sed -n '2,/^[^#]/ s/^# \{0,1\}//p' "$1"; }

_wait_shown() { # LABEL: until STEP_PID ends, show the seconds it has taken
    local start=$SECONDS
    while kill -0 "$STEP_PID" 2>/dev/null; do
        printf '\r  %-46s %4ds ' "$1" $((SECONDS - start))
        sleep 0.5
    done
    printf '\r'
}

# step LABEL LOG COMMAND...: run with all output in LOG; show progress; on failure show the end of LOG.
step() {
    local label=$1 log=$2 start=$SECONDS rc=0
    shift 2
    printf '\n== %s\n' "$label" >>"$log"
    "$@" >>"$log" 2>&1 &
    STEP_PID=$!
    if [ -t 1 ]; then _wait_shown "$label"; fi
    wait "$STEP_PID" || rc=$?
    STEP_PID=""
    if [ "$rc" -eq 0 ]; then
        printf '  %-46s %4ds\n' "$label" $((SECONDS - start))
        return 0
    fi
    printf '  %-46s failed\n\n' "$label"
    tail -n 25 "$log" | sed 's/^/    /' >&2
    printf '\n  whole log: %s\n' "$log" >&2
    return "$rc"
}

# begin_run FOLDER [OUT]: OUT becomes the folder of a run, by default a new one next to FOLDER. It gets this script and all
# that is printed from here on.
begin_run() {
    if [ $# -gt 1 ]; then
        OUT=$2
        mkdir -p -- "$OUT"
    else
        OUT="$1-$(date +%Y%m%d-%H%M%S)"
        mkdir -- "$OUT"
    fi
    OUT="$(cd -- "$OUT" && pwd)"
    [ "$0" -ef "$OUT/command.sh" ] || cp -- "$0" "$OUT/command.sh"
    say "all files go to $OUT"
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
    exec > >(tee -a "$OUT/train.log") 2>&1
    cd -- "$ROOT"
}
