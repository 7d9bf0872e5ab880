#!/usr/bin/env bash
# Run the Megatron tests against several versions of megatron-core, each installed in a folder of
# its own next to this environment. From 0.17 on also the slow tests with Megatron's training code.
#
#   bash scripts/test_megatron_versions.sh [VERSION | CHECKOUT ...] [-- PYTEST ARGUMENTS]
#
# Default: 0.15.3 0.16.1 0.17.1 0.18.2 0.19.2. CHECKOUT is the path of a checkout of Megatron-LM,
# such as its main branch, whose C++ helper is compiled where it is not there (with g++ and the
# headers of pybind11 that torch has). PYTHON=python and FOLDER=runs/megatron-versions may be set
# before the command. With pytest arguments only these run.
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

compile_helper() { # FOLDER: without -DNDEBUG an assertion would end ranks on tiny data sets
    local suffix python_h torch_h
    { read -r suffix && read -r python_h && read -r torch_h; } < <("$python" -c '
import sysconfig, torch
print(sysconfig.get_config_var("EXT_SUFFIX"))
print(sysconfig.get_path("include"))
print(torch.__path__[0] + "/include")')
    [ ! -f "$1/helpers_cpp$suffix" ] || return 0
    g++ -O3 -DNDEBUG -shared -std=c++17 -fPIC -I"$python_h" -I"$torch_h" \
        "$1/helpers.cpp" -o "$1/helpers_cpp$suffix"
}

failed=()
for version in "${versions[@]}"; do
    target=$(realpath -m "$folder")/mcore-$version
    if [ -d "$version/megatron/core" ]; then
        target=$(realpath "$version")
        compile_helper "$target/megatron/core/datasets"
    elif [ ! -d "$target/megatron" ]; then
        "$python" -m pip install -q --no-deps --ignore-requires-python --target "$target" \
            "megatron-core==$version"
    fi
    # megatron is a namespace, which spans both folders: this ends it where the other version would
    # give what this one lacks
    [ -d "$target/megatron/training" ] || touch "$target/megatron/__init__.py"
    echo "== Megatron $version"
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
