#!/usr/bin/env bash
# Train through fairseq on several nodes under Slurm. Copy it, change the #SBATCH lines, and submit it from the repository:
#
#   sbatch scripts/slurm_fairseq.sh DATA --arch moe_lm_small --moe-expert-count 64 --save-dir runs/a [any flag of fairseq-train]
#
# DATA is a folder written by fairseq-preprocess. All nodes must see this folder, the folder of --save-dir and the virtual
# environment (default: .venv in the folder where you submit; set VENV=/path/to/it for another one). If the job is submitted again
# with the same arguments, or restarted by Slurm (--requeue), it continues from the last checkpoint. torchrun restarts the ranks
# after a failure, up to RESTARTS times (default 3). `moe-plugin report runs/a` shows stats.jsonl and train.log in --save-dir.
# NUMA=/sys before sbatch binds each rank to the processors next to its GPU (docs/clusters.md).
#SBATCH --job-name=moe-fairseq
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
[ $# -ge 1 ] || die "usage: sbatch scripts/slurm_fairseq.sh DATA [flags of fairseq-train]"
[ -n "${SLURM_JOB_NODELIST:-}" ] || die "this is not a Slurm job. Submit it with sbatch scripts/slurm_fairseq.sh $*"
VENV=${VENV:-${SLURM_SUBMIT_DIR:-$PWD}/.venv}
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

# write the files that `moe-plugin report` and `watch` read to --save-dir; given flags take precedence
SAVE=$(printf '%s\n' "$@" | sed -n '/^--save-dir$/{n;p;}; s/^--save-dir=//p' | tail -n 1)
RECORDS=()
if [ -n "$SAVE" ]; then
    mkdir -p -- "$SAVE"
    RECORDS=(--moe-stats-jsonl "$SAVE/stats.jsonl" --log-format json --log-file "$SAVE/train.log")
fi

BIND=()
[ -z "${NUMA:-}" ] || BIND=(-m moe_plugin.hosts.plain.binding --sysfs "$NUMA" "$VENV/bin/python" -u)
srun "$VENV/bin/python" -m torch.distributed.run \
    --nnodes "$SLURM_NNODES" --nproc_per_node "${SLURM_GPUS_ON_NODE:-1}" --max-restarts "${RESTARTS:-3}" \
    --rdzv_id "$SLURM_JOB_ID" --rdzv_backend c10d --rdzv_endpoint "$HEAD_NODE:$PORT" \
    ${BIND[@]+"${BIND[@]}"} \
    "$VENV/bin/fairseq-train" "$1" --user-dir moe_plugin --task language_modeling --criterion moe_cross_entropy \
    --ddp-backend legacy_ddp ${RECORDS[@]+"${RECORDS[@]}"} "${@:2}"
