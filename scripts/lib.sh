# Shared by the scripts in this folder: the repository's root, messages, and steps that log.
# shellcheck shell=bash

ROOT="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)"
STEP_PID=""
trap 'if [ -n "$STEP_PID" ]; then kill "$STEP_PID" 2>/dev/null; fi; echo; exit 130' INT TERM

say() { printf '%s\n' "$*"; }

# die MESSAGE: print the error and end the script. MESSAGE says what went wrong and what to do.
die() {
    printf '\nerror: %s\n' "$*" >&2
    exit 1
}

# usage SCRIPT: print the comment block at the top of a script as its help.
usage() { sed -n '2,/^[^#]/ s/^# \{0,1\}//p' "$1"; }

_wait_shown() { # LABEL: show the elapsed seconds until STEP_PID ends
    local start=$SECONDS
    while kill -0 "$STEP_PID" 2>/dev/null; do
        printf '\r  %-46s %4ds ' "$1" $((SECONDS - start))
        sleep 0.5
    done
    printf '\r'
}

# step LABEL LOG COMMAND...: run the command with all output in LOG, and show the progress. If the
# command fails, show the end of LOG.
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

# begin_run FOLDER [OUT]: make OUT the folder of a run. Defaults to a new folder next to FOLDER. This
# script and all further output are written to the folder.
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
