#!/usr/bin/env bash
# Run the Megatron tests against several versions of megatron-core, each installed in its own folder next to this environment.
#
#   bash scripts/test_megatron_versions.sh [VERSION ...]        default: 0.15.3 0.16.1 0.17.1 0.18.2 0.19.2
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python}
folder=${FOLDER:-$(mktemp -d)}
failed=()
for version in "${@:-0.15.3 0.16.1 0.17.1 0.18.2 0.19.2}"; do
    for each in $version; do
        target=$folder/mcore-$each
        if [ ! -d "$target/megatron" ]; then
            "$python" -m pip install -q --no-deps --ignore-requires-python --target "$target" "megatron-core==$each"
        fi
        echo "== megatron-core $each"
        PYTHONPATH=$target${PYTHONPATH:+:$PYTHONPATH} OMP_NUM_THREADS=1 "$python" -m pytest -q -W ignore -p no:cacheprovider \
            tests/hosts/megatron -m "not slow" || failed+=("$each")
    done
done
if [ ${#failed[@]} -gt 0 ]; then
    echo "failed: ${failed[*]}" >&2
    exit 1
fi
