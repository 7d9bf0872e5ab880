#!/usr/bin/env bash
# Run the Megatron tests against several versions of megatron-core, each installed in a folder of
# its own next to this environment. From 0.17 on also the slow tests with Megatron's training code.
#
#   bash scripts/test_megatron_versions.sh [VERSION ...] [-- PYTEST ARGUMENTS]
#
# Default: 0.15.3 0.16.1 0.17.1 0.18.2 0.19.2. PYTHON=python and FOLDER=runs/megatron-versions may
# be set before the command. With pytest arguments only these run.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python}
folder=${FOLDER:-runs/megatron-versions}
versions=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
    versions+=("$1")
    shift
done
[ $# -eq 0 ] || shift
[ ${#versions[@]} -gt 0 ] || versions=(0.15.3 0.16.1 0.17.1 0.18.2 0.19.2)

run() { # TARGET PYTEST-ARGUMENTS...
    local target=$1
    shift
    PYTHONPATH=$target${PYTHONPATH:+:$PYTHONPATH} OMP_NUM_THREADS=1 \
        "$python" -m pytest -q -W ignore -p no:cacheprovider "$@"
}

failed=()
for version in "${versions[@]}"; do
    target=$(realpath -m "$folder")/mcore-$version
    if [ ! -d "$target/megatron" ]; then
        "$python" -m pip install -q --no-deps --ignore-requires-python --target "$target" \
            "megatron-core==$version"
    fi
    # megatron is a namespace, which spans both folders: this ends it where the other version would give what this one lacks
    [ -d "$target/megatron/training" ] || touch "$target/megatron/__init__.py"
    echo "== megatron-core $version"
    if [ $# -gt 0 ]; then
        run "$target" "$@" || failed+=("$version")
        continue
    fi
    run "$target" tests/hosts/megatron -m "not slow" || failed+=("$version")
    if [ -d "$target/megatron/training" ]; then
        run "$target" tests/hosts/megatron/test_megatron_script.py \
            tests/hosts/megatron/test_megatron_script_run.py -m slow || failed+=("$version")
    fi
done
if [ ${#failed[@]} -gt 0 ]; then
    echo "failed: ${failed[*]}" >&2
    exit 1
fi
