#!/usr/bin/env bash
# Run the core tests with several versions of torch, each installed in a separate environment. The
# tests that need fairseq or Megatron do not run.
#
#   bash scripts/test_torch_versions.sh [options] [VERSION ...] [-- PYTEST ARGUMENTS]
#
#   VERSION        versions of torch (default: 2.9.1 2.14.1, which are the oldest that is
#                  supported, and the newest)
#   --folder DIR   folder for the environments and the logs (default: runs/torch-versions)
#   --python EXE   interpreter for the environments (default: python3)
#   --fairseq2     instead, run the tests with fairseq2 0.8.1 and torch 2.9.1, which it needs
#   --keep         keep the environments, so that the next run need not install them again
#
# torch for Linux comes with libraries for GPUs: each version downloads 3 to 4 GB, and needs 6 to
# 8 GB on the disk until its tests have ended. With pytest arguments, only the tests that they
# select run.
set -euo pipefail
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

FOLDER="$ROOT/runs/torch-versions" PYTHON=python3 KEEP=0 VERSIONS=() PREFIX=""
PACKAGES=(-e ".[forest,hf,test]")
TESTS=(-m "not slow and not fairseq and not megatron" tests/test_layer.py tests/exactness
    tests/routing tests/dispatch tests/experts tests/comm tests/kernels tests/training
    tests/checkpoint tests/hosts/plain)
while [ $# -gt 0 ] && [ "$1" != -- ]; do
    case "$1" in
        --folder) FOLDER=$(realpath -m -- "$2"); shift 2 ;;
        --python) PYTHON=$2; shift 2 ;;
        --fairseq2)  # soundfile contains libsndfile, which fairseq2 loads
            PACKAGES=(-e ".[test]" fairseq2==0.8.1 soundfile) VERSIONS=(2.9.1) PREFIX=fairseq2-
            TESTS=(tests/hosts/plain/test_fairseq2.py tests/hosts/plain/test_linear_maps.py)
            shift ;;
        --keep) KEEP=1; shift ;;
        -h | --help) usage "$0"; exit 0 ;;
        -*) die "unknown option $1; see bash scripts/test_torch_versions.sh --help" ;;
        *) VERSIONS+=("$1"); shift ;;
    esac
done
[ $# -eq 0 ] || shift
[ ${#VERSIONS[@]} -gt 0 ] || VERSIONS=(2.9.1 2.14.1)
[ $# -eq 0 ] || TESTS=("$@")
mkdir -p -- "$FOLDER"
cd -- "$ROOT"

install() { # VERSION VENV LOG
    [ -x "$2/bin/python" ] || step "torch $1: environment" "$3" "$PYTHON" -m venv "$2" || return 1
    # without pip's cache, which would retain every version
    step "torch $1: packages" "$3" "$2/bin/python" -m pip install --no-cache-dir --no-compile \
        "torch==$1" "${PACKAGES[@]}" || return 1
    # fairseq2 looks for this library in the system and then in the folder `lib` of the environment
    local library
    for library in "$2"/lib/python*/site-packages/_soundfile_data/libsndfile_*.so; do
        [ ! -e "$library" ] || ln -sf "$library" "$2/lib/libsndfile.so.1"
    done
}

run_tests() { # VENV: with as many processes as cores, at most four
    local workers
    workers=$(getconf _NPROCESSORS_ONLN)
    [ "$workers" -le 4 ] || workers=4
    OMP_NUM_THREADS=1 "$1/bin/python" -m pytest -q -n "$workers" --dist worksteal \
        -p no:cacheprovider "${TESTS[@]}"
}

FAILED=()
for version in "${VERSIONS[@]}"; do
    venv="$FOLDER/$PREFIX$version"
    log="$venv.log"
    : >"$log"
    if install "$version" "$venv" "$log" &&
        step "torch $version: tests" "$log" run_tests "$venv"; then
        say "torch $version: $(tail -n 1 "$log")"
    else
        FAILED+=("$version")
        say "torch $version failed: $(tail -n 1 "$log")"
    fi
    [ "$KEEP" -eq 1 ] || rm -rf -- "$venv"
done
[ ${#FAILED[@]} -eq 0 ] || die "failed with torch ${FAILED[*]}. The logs are in $FOLDER"
