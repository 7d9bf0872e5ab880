#!/usr/bin/env bash
# Train on Megatron's own training loop on several nodes under Slurm. Copy it, change the #SBATCH lines, and submit it from the
# repository:
#
#   sbatch scripts/slurm_megatron.sh PREFIX --num-layers 12 --hidden-size 768 ... --save runs/a --load runs/a --save-interval 500 \
#       [any flag of Megatron or of this package]
#
# PREFIX is an indexed dataset without .bin/.idx. All nodes must see the dataset, the folder of --save and the virtual environment
# (default: .venv in the folder where you submit; set VENV=/path/to/it for another one). With --save and --load, the job continues
# from the last checkpoint if it is submitted again with the same arguments or restarted by Slurm (--requeue). torchrun restarts
# the ranks after a failure, up to RESTARTS times (default 3). The job runs the package's short script pretrain_gpt_moe, or a
# script of Megatron-LM with SCRIPT=/path/to/pretrain_gpt.py. `moe-plugin report runs/a` shows stats.jsonl and log.jsonl in --save.
# NUMA=/sys before sbatch binds each rank to the processors next to its GPU (docs/clusters.md).
#SBATCH --job-name=moe-megatron
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=24:00:00
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
set -euo pipefail

die() { echo "error: $*" >&2; exit 2; }
[ $# -ge 1 ] || die "usage: sbatch scripts/slurm_megatron.sh PREFIX [flags of Megatron or of this package]"
[ -n "${SLURM_JOB_NODELIST:-}" ] || die "this is not a Slurm job. Submit it with sbatch scripts/slurm_megatron.sh $*"
VENV=${VENV:-${SLURM_SUBMIT_DIR:-$PWD}/.venv}
SCRIPT=${SCRIPT:-pretrain_gpt_moe}
[ -x "$VENV/bin/python" ] || die "$VENV has no bin/python. Submit from the repository, or set VENV=/path/to/the/environment"
HEAD_NODE=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# jobs that share a node need different ports
PORT=${PORT:-$((29500 + SLURM_JOB_ID % 1000))}
# from Slurm 22.05 on srun does not inherit --cpus-per-task, and ranks would share one processor
[ -z "${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
# if torchrun ends with an error on a node, the job ends
export SLURM_KILL_BAD_EXIT=1
# restarted ranks must not find the addresses of dead ranks (docs/faults.md)
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

# write the files that `moe-plugin report` and `watch` read to --save; given flags take precedence
SAVE=$(printf '%s\n' "$@" | sed -n '/^--save$/{n;p;}; s/^--save=//p' | tail -n 1)
RECORDS=()
[ -z "$SAVE" ] || RECORDS=(--moe-stats-jsonl "$SAVE/stats.jsonl")

BIND=()
[ -z "${NUMA:-}" ] || BIND=(-m moe_plugin.hosts.plain.binding --sysfs "$NUMA" "$VENV/bin/python" -u)
srun "$VENV/bin/python" -m torch.distributed.run \
    --nnodes "$SLURM_NNODES" --nproc_per_node "${SLURM_GPUS_ON_NODE:-1}" --max-restarts "${RESTARTS:-3}" \
    --rdzv_id "$SLURM_JOB_ID" --rdzv_backend c10d --rdzv_endpoint "$HEAD_NODE:$PORT" \
    ${BIND[@]+"${BIND[@]}"} -m moe_plugin.hosts.megatron.launch "$SCRIPT" --data-path "$1" ${RECORDS[@]+"${RECORDS[@]}"} "${@:2}"
