#!/usr/bin/env bash
# Train an MoE language model through stock fairseq-train and this plugin.
#
#   bash scripts/train_fairseq.sh DATA SAVE [RANKS] [fairseq flags ...]
#
#   DATA   folder written by fairseq-preprocess --only-source
#   SAVE   folder for checkpoints and records (moe-plugin report SAVE); a second call resumes the run
#   RANKS  processes that share the experts (default 2), one per GPU, or on the CPU
#
# NUMA=/sys before the command binds each rank to the processors next to its GPU (docs/clusters.md).
# Flags after RANKS override the flags below, e.g. --max-update 100 --moe-expert-count 16 --arch moe_lm_small.
set -euo pipefail

if [ $# -lt 2 ]; then
    sed -n '2,12s/^# \{0,1\}//p' "$0"
    exit 2
fi
DATA="$1" SAVE="$2" RANKS="${3:-2}"
shift "$(($# < 3 ? $# : 3))"
ROOT="$(cd "$(dirname "$0")/.." && pwd)"
BIN="$ROOT/.venv/bin"
[ -x "$BIN/fairseq-train" ] || BIN="$(dirname "$(command -v fairseq-train || true)")"
[ -x "$BIN/fairseq-train" ] || { echo "fairseq-train is not installed. Run bash scripts/setup.sh first" >&2; exit 1; }
[ -f "$DATA/dict.txt" ] || { echo "$DATA contains no preprocessed data (dict.txt is missing). Run fairseq-preprocess --only-source first" >&2; exit 1; }

DEVICES="$("$BIN/python" -c 'import torch; print(torch.cuda.device_count())')"
WHERE=()
if [ "$DEVICES" -lt "$RANKS" ]; then
    WHERE=(--cpu --distributed-backend gloo)
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
fi

BIND=()
[ -z "${NUMA:-}" ] || BIND=(-m moe_plugin.hosts.plain.binding --sysfs "$NUMA" "$BIN/python" -u)
mkdir -p -- "$SAVE"  # fairseq opens --log-file before it creates the folder
exec "$BIN/python" -m torch.distributed.run --standalone --nproc_per_node "$RANKS" ${BIND[@]+"${BIND[@]}"} "$BIN/fairseq-train" "$DATA" \
    --user-dir moe_plugin --task language_modeling --arch moe_lm_tiny \
    --moe-freq 2 --moe-expert-count 8 --moe-second-expert-policy all --moe-dispatch ragged --moe-capacity-factor none \
    --criterion moe_cross_entropy --moe-gate-loss-wt 0.01 \
    --tokens-per-sample 128 --batch-size 8 --dropout 0 --optimizer adam --adam-betas '(0.9, 0.98)' --clip-norm 1.0 \
    --lr 0.003 --lr-scheduler inverse_sqrt --warmup-updates 20 --max-update 200 --save-interval-updates 50 --keep-interval-updates 1 \
    --no-epoch-checkpoints --log-format json --log-interval 10 \
    --log-file "$SAVE/train.log" --moe-stats-jsonl "$SAVE/stats.jsonl" --ddp-backend legacy_ddp --save-dir "$SAVE" ${WHERE[@]+"${WHERE[@]}"} "$@"
