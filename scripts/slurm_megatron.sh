#!/usr/bin/env bash
# Train through Megatron-core on several nodes under Slurm. Copy it, change the #SBATCH lines, and submit it:
#
#   sbatch scripts/slurm_megatron.sh PREFIX --num-layers 12 --hidden-size 768 ... [any flag of moe_plugin.hosts.megatron.train]
#
# PREFIX is an indexed dataset without .bin/.idx, in a place that all nodes see. The virtual environment (default: .venv next to
# scripts/; or submit with VENV=/path/to/it) has to be visible, too. To use Megatron-LM's own pretrain_gpt.py instead, see the README.
#SBATCH --job-name=moe-megatron
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
[ $# -ge 1 ] || { echo "usage: sbatch $0 PREFIX [flags of moe_plugin.hosts.megatron.train]" >&2; exit 2; }

srun "$VENV/bin/python" -m torch.distributed.run \
    --nnodes "$SLURM_NNODES" --nproc_per_node "$GPUS" \
    --rdzv_id "$SLURM_JOB_ID" --rdzv_backend c10d --rdzv_endpoint "$HEAD_NODE:29500" \
    -m moe_plugin.hosts.megatron.train --data-path "$1" "${@:2}"
