#!/usr/bin/env bash
# Train on Megatron's own training loop on several nodes under Slurm. Copy it, change the #SBATCH lines, and submit it from the
# repository:
#
#   sbatch scripts/slurm_megatron.sh PREFIX --num-layers 12 --hidden-size 768 ... --save runs/a --load runs/a --save-interval 500 \
#       [any flag of Megatron's, or of ours]
#
# PREFIX is an indexed dataset without .bin/.idx, in a place that all nodes see. The virtual environment (default: .venv in the
# folder it is submitted from; or submit with VENV=/path/to/it) and the folder of --save have to be visible, too. With --save and
# --load it goes on from the last checkpoint where it is submitted again with the same arguments, or started again by Slurm
# (--requeue). A failed rank is started again by torchrun, RESTARTS times (default 3). It runs the package's short script,
# pretrain_gpt_moe, or with SCRIPT=/path/to/pretrain_gpt.py a script of Megatron-LM. The folder of --save gets
# stats.jsonl and log.jsonl, which `moe-plugin report runs/a` shows.
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
[ $# -ge 1 ] || die "usage: sbatch scripts/slurm_megatron.sh PREFIX [flags of Megatron's, or of ours]"
[ -n "${SLURM_JOB_NODELIST:-}" ] || die "this is no job of Slurm: submit it with sbatch scripts/slurm_megatron.sh $*"
VENV=${VENV:-${SLURM_SUBMIT_DIR:-$PWD}/.venv}
SCRIPT=${SCRIPT:-pretrain_gpt_moe}
[ -x "$VENV/bin/python" ] || die "$VENV has no bin/python: submit from the repository, or with VENV=/path/to/the/environment"
HEAD_NODE=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# jobs that share a node need a port each
PORT=${PORT:-$((29500 + SLURM_JOB_ID % 1000))}
# srun does not take over --cpus-per-task from Slurm 22.05 on: ranks would share one processor
[ -z "${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
# a node whose torchrun ends with an error ends the job
export SLURM_KILL_BAD_EXIT=1
# ranks that start again must not find the addresses of dead ones (docs/faults.md)
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

# the folder of --save gets what `moe-plugin report` and `watch` read; flags that are given win
SAVE=$(printf '%s\n' "$@" | sed -n '/^--save$/{n;p;}; s/^--save=//p' | tail -n 1)
RECORDS=()
[ -z "$SAVE" ] || RECORDS=(--moe-stats-jsonl "$SAVE/stats.jsonl")

BIND=()
[ -z "${NUMA:-}" ] || BIND=(-m moe_plugin.hosts.plain.binding --sysfs "$NUMA" "$VENV/bin/python" -u)
srun "$VENV/bin/python" -m torch.distributed.run \
    --nnodes "$SLURM_NNODES" --nproc_per_node "${SLURM_GPUS_ON_NODE:-1}" --max-restarts "${RESTARTS:-3}" \
    --rdzv_id "$SLURM_JOB_ID" --rdzv_backend c10d --rdzv_endpoint "$HEAD_NODE:$PORT" \
    ${BIND[@]+"${BIND[@]}"} -m moe_plugin.hosts.megatron.launch "$SCRIPT" --data-path "$1" ${RECORDS[@]+"${RECORDS[@]}"} "${@:2}"
