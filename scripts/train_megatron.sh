#!/usr/bin/env bash
# Train a small MoE language model on a text file with Megatron's own training loop. The folder gets checkpoints, a log and records,
# which `moe-plugin report OUTPUT_FOLDER` shows. Further arguments are those of Megatron or of this package (docs/megatron.md).
#
#   bash scripts/train_megatron.sh TEXT_FILE OUTPUT_FOLDER [--train-iters 500 --num-experts 16 ...]
#
# Set RANKS=2 (processes on this machine) before the command. Experts are distributed over all ranks. NUMA=/sys binds each rank
# to the processors next to its GPU (docs/clusters.md).
set -euo pipefail
if [ $# -lt 2 ]; then
    sed -n '2,8p' "$0" >&2
    exit 2
fi
text=$1 out=$2
shift 2
ranks=${RANKS:-2}
python=${PYTHON:-python}
if [ ! -e "$out/data/corpus.idx" ]; then
    "$python" -m moe_plugin.hosts.megatron.data --input "$text" --output-prefix "$out/data/corpus"
fi
BIND=()
[ -z "${NUMA:-}" ] || BIND=(-m moe_plugin.hosts.plain.binding --sysfs "$NUMA" "$python" -u)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec "$python" -m torch.distributed.run --standalone --nproc_per_node "$ranks" ${BIND[@]+"${BIND[@]}"} \
    -m moe_plugin.hosts.megatron.launch pretrain_gpt_moe \
    --data-path "$out/data/corpus" --num-workers 0 \
    --save "$out" --load "$out" --save-interval 100 --log-interval 10 --moe-stats-jsonl "$out/stats.jsonl" \
    --position-embedding-type rope --max-position-embeddings 131072 \
    --num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 --micro-batch-size 8 --train-iters 200 --lr 2e-3 \
    --lr-warmup-fraction 0.1 --num-experts 8 --moe-ffn-hidden-size 256 --moe-router-topk 2 --moe-aux-loss-coeff 0.01 --disable-bias-linear \
    --hidden-dropout 0 --attention-dropout 0 --expert-model-parallel-size "$ranks" "$@"
