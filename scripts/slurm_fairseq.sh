#!/usr/bin/env bash
# Train through fairseq on several nodes under Slurm. Copy it, change the #SBATCH lines, and submit it:
#
#   sbatch scripts/slurm_fairseq.sh DATA --arch moe_lm_small --moe-expert-count 64 [any flag of fairseq-train]
#
# DATA is what fairseq-preprocess wrote, in a place that all nodes see. The virtual environment (default: .venv next to scripts/; or
# submit with VENV=/path/to/it) has to be visible, too. Start it again with the same arguments and it goes on from the last checkpoint.
#SBATCH --job-name=moe-fairseq
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=24:00:00
#SBATCH --output=%x-%j.log
set -euo pipefail

VENV=${VENV:-${SLURM_SUBMIT_DIR:-$PWD}/.venv}
GPUS=${SLURM_GPUS_ON_NODE:-1}
HEAD_NODE=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
[ $# -ge 1 ] || { echo "usage: sbatch $0 DATA [flags of fairseq-train]" >&2; exit 2; }

srun "$VENV/bin/python" -m torch.distributed.run \
    --nnodes "$SLURM_NNODES" --nproc_per_node "$GPUS" \
    --rdzv_id "$SLURM_JOB_ID" --rdzv_backend c10d --rdzv_endpoint "$HEAD_NODE:29500" \
    "$VENV/bin/fairseq-train" "$1" --user-dir moe_plugin --task language_modeling --criterion moe_cross_entropy \
    --ddp-backend legacy_ddp "${@:2}"
