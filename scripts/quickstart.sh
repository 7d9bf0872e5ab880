#!/usr/bin/env bash
# Set up moe-plugin and train a small Mixture-of-Experts language model twice: through fairseq and through Megatron-core,
# each on two ranks with expert parallelism. This takes about 4 minutes on two CPU cores. Finished steps are not repeated.
#
#   bash scripts/quickstart.sh [--fresh] [--steps N] [--hosts fairseq,megatron] [--out DIR] [--venv DIR] [--torch SPEC]
#
#   --fresh        train again from the beginning
#   --steps N      training steps (default: the number in configs/quickstart.yaml)
#   --hosts LIST   fairseq,megatron (default) or one of them
#   --out DIR      folder for the corpus, logs and checkpoints (default: runs/quickstart in the repository)
#   --venv DIR     the virtual environment (default: .venv in the repository)
#   --torch SPEC   requirement for torch, if it has to be installed (see scripts/setup.sh)
set -euo pipefail
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

VENV="$ROOT/.venv" SETUP=(--training) ARGS=()
while [ $# -gt 0 ]; do
    case "$1" in
        --venv) VENV=$2; SETUP+=(--venv "$2"); shift 2 ;;
        --torch) SETUP+=(--torch "$2"); shift 2 ;;
        -h | --help) usage "$0"; exit 0 ;;
        *) ARGS+=("$1"); shift ;;
    esac
done
case "$VENV" in /*) ;; *) VENV="$PWD/$VENV" ;; esac
bash "$ROOT/scripts/setup.sh" "${SETUP[@]}"
trap - INT TERM
export PATH="$VENV/bin:$PATH"
exec "$VENV/bin/python" "$ROOT/scripts/quickstart.py" ${ARGS[@]+"${ARGS[@]}"}
