#!/usr/bin/env bash
# Run the Megatron tests with several versions of megatron-core, each installed in a separate folder.
# From 0.17 on, the slow tests with Megatron's training code also run.
#
#   bash scripts/test_megatron_versions.sh [VERSION | CHECKOUT ...] [-- PYTEST ARGUMENTS]
#
# Default: 0.15.3 0.16.1 0.17.1 0.18.2 0.19.2. CHECKOUT is the path of a checkout of Megatron-LM,
# such as its main branch. Its C++ helper is compiled if necessary, with g++ and the headers of
# pybind11 in torch. You may set PYTHON=python and FOLDER=runs/megatron-versions before the command.
# With pytest arguments, only the tests that they select run.
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

compile_helper() { # FOLDER: with -DNDEBUG, because an assertion would end ranks on tiny data sets
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
    # megatron is a namespace package that spans both folders. This file ends the namespace, so that
    # modules missing in this version are not imported from the other version
    [ -d "$target/megatron/training" ] || touch "$target/megatron/__init__.py"
    echo "== Megatron $version"
    if [ $# -gt 0 ]; then
        run "$target" "$@" || failed+=("$version")
        continue
    fi
    run "$target" tests/hosts/megatron tests/hosts/common -m "megatron and not slow" ||
        failed+=("$version")
    if [ -d "$target/megatron/training" ]; then
        run "$target" tests/hosts/megatron/test_megatron_script.py -m slow || failed+=("$version")
    fi
done
if [ ${#failed[@]} -gt 0 ]; then
    echo "failed: ${failed[*]}" >&2
    exit 1
fi
