#!/usr/bin/env bash
# Train replicas that join and leave, with torchft. Each replica is a job with the whole model, and gradients are averaged over
# the live replicas. A replica that dies is restarted and loads the weights of a live replica; the others lose at most one step.
# A lighthouse that dies is restarted, too; the replicas wait for it and continue.
#
#   bash scripts/train_elastic.sh [OPTIONS] HOST OUT [arguments of the training program ...]
#
#   HOST               plain (scripts/train_plain.py), fairseq (fairseq-train) or megatron (pretrain_gpt_moe)
#   OUT                folder; OUT/replica-N contains the checkpoints of replica N, and OUT/replica-N.log its output
#
#   --replicas N       replicas on this machine (default 2)
#   --ranks N          processes of each replica, which share the experts (default 1)
#   --first N          number of the first replica on this machine (default 0); every replica needs a different number
#   --lighthouse URL   address of a running lighthouse (default: start a lighthouse on this machine)
#   --address HOST     name of this machine as other machines reach it (default: all replicas are on this machine)
#   --port N           port of the lighthouse on this machine (default 29510)
#   --timeout SECONDS  time after which a replica without an answer counts as lost (default 60); must be longer than a step
#   --restarts N       how often a replica or the lighthouse is restarted (default 10)
#   --seed SEED        replica N reads its data in the order of seed SEED + N (default 1)
#
# NUMA=/sys before the command binds each rank to the processors next to its GPU (docs/clusters.md).
# RUST_LOG=info before the command logs every action of torchft.
# If there are enough GPUs, each replica uses different GPUs. Examples with 2 replicas of 2 processes on one machine, and on two:
#
#   bash scripts/train_elastic.sh --ranks 2 plain runs/elastic --steps 200
#   bash scripts/train_elastic.sh --address node1 plain runs/elastic --steps 200
#   bash scripts/train_elastic.sh --lighthouse http://node1:29510 --first 2 plain runs/elastic --steps 200
set -euo pipefail
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

REPLICAS=2 RANKS=1 FIRST=0 LIGHTHOUSE="" ADDRESS=127.0.0.1 PORT=29510 TIMEOUT=60 RESTARTS=10 SEED=1
number() { # OPTION VALUE LEAST
    [[ "$2" =~ ^[0-9]+$ ]] && [ "$2" -ge "$3" ] || die "$1 $2: must be a whole number >= $3"
}
while [ $# -gt 0 ]; do
    case "$1" in
        -h | --help) usage "$0"; exit 0 ;;
        --replicas | --ranks | --first | --lighthouse | --address | --port | --timeout | --restarts | --seed)
            [ $# -gt 1 ] || die "$1 needs a value; see --help" ;;&
        --replicas) number "$1" "$2" 1; REPLICAS=$2; shift 2 ;;
        --ranks) number "$1" "$2" 1; RANKS=$2; shift 2 ;;
        --first) number "$1" "$2" 0; FIRST=$2; shift 2 ;;
        --port) number "$1" "$2" 1; PORT=$2; shift 2 ;;
        --timeout) number "$1" "$2" 1; TIMEOUT=$2; shift 2 ;;
        --restarts) number "$1" "$2" 0; RESTARTS=$2; shift 2 ;;
        --seed) number "$1" "$2" 0; SEED=$2; shift 2 ;;
        --lighthouse) LIGHTHOUSE=$2; shift 2 ;;
        --address) ADDRESS=$2; shift 2 ;;
        -*) die "$1 is not an option of this script; see --help. Put arguments of the program after OUT" ;;
        *) break ;;
    esac
done
[ $# -ge 2 ] || { usage "$0" >&2; exit 2; }
HOST=$1 OUT=$2
shift 2
case "$HOST" in plain | fairseq | megatron) ;; *) die "host $HOST is unknown; known: plain, fairseq, megatron" ;; esac
BIN="${VENV:-$ROOT/.venv}/bin"
[ -x "$BIN/python" ] || BIN="$(dirname "$(command -v python)")"
[ -x "$BIN/torchft_lighthouse" ] || die "torchft is not installed in $BIN: pip install 'moe-plugin[elastic]'"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# restarted ranks must not find the addresses of dead ranks (docs/faults.md)
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
export RUST_LOG=${RUST_LOG:-warn}
mkdir -p -- "$OUT"

PIDS=()
stop() {
    trap - EXIT INT TERM
    [ ${#PIDS[@]} -eq 0 ] || kill "${PIDS[@]}" 2>/dev/null || true
    wait || true
}
trap stop EXIT
trap 'exit 130' INT TERM

replica() { # N ARGUMENTS...: run one replica with a separate torchrun
    local n=$1 folder="$OUT/replica-$1" program bind=()
    shift
    [ -z "${NUMA:-}" ] || bind=(-m moe_plugin.hosts.plain.binding --sysfs "$NUMA" --first $(((n - FIRST) * RANKS))
        --total $((REPLICAS * RANKS)) "$BIN/python" -u)
    case "$HOST" in
        plain) program=("$ROOT/scripts/train_plain.py" "$folder" --lighthouse "$LIGHTHOUSE" --replica "$n"
            --timeout "$TIMEOUT") ;;
        fairseq) program=("$BIN/fairseq-train" --save-dir "$folder") ;;
        megatron) program=(-m moe_plugin.hosts.megatron.launch pretrain_gpt_moe --save "$folder" --load "$folder") ;;
    esac
    if [ "$HOST" != plain ]; then
        set -- "$@" --seed $((SEED + n)) --moe-lighthouse "$LIGHTHOUSE" --moe-replica "$n" --moe-timeout "$TIMEOUT"
    fi
    exec "$BIN/python" -m torch.distributed.run --standalone --nproc_per_node "$RANKS" --max-restarts "$RESTARTS" \
        ${bind[@]+"${bind[@]}"} "${program[@]}" "$@"
}

lighthouse() { # BIND: run a lighthouse until this script ends, and restart it at most RESTARTS times
    local pid="" status tries
    trap '[ -z "$pid" ] || kill "$pid" 2>/dev/null || true; exit 143' TERM
    for ((tries = 0; tries <= RESTARTS; tries++)); do
        "$BIN/torchft_lighthouse" --bind "$1:$PORT" --min_replicas 1 --join_timeout_ms $((TIMEOUT * 1000)) &
        pid=$! status=0
        wait "$pid" || status=$?
        pid=""
        say "the lighthouse ended with status $status, start $((tries + 1)) of at most $((RESTARTS + 1))"
        sleep 1
    done
}

if [ -z "$LIGHTHOUSE" ]; then
    LIGHTHOUSE="http://$ADDRESS:$PORT" BIND=0.0.0.0
    [ "$ADDRESS" != 127.0.0.1 ] || BIND=127.0.0.1
    lighthouse "$BIND" >"$OUT/lighthouse.log" 2>&1 &
    PIDS+=($!)
fi
DEVICES="$("$BIN/python" -c 'import torch; print(torch.cuda.device_count())')"
JOBS=()
for ((i = 0; i < REPLICAS; i++)); do
    if [ "$DEVICES" -ge $((REPLICAS * RANKS)) ]; then
        CUDA_VISIBLE_DEVICES="$(seq -s, $((i * RANKS)) $((i * RANKS + RANKS - 1)))"
        export CUDA_VISIBLE_DEVICES
    fi
    replica $((FIRST + i)) "$@" >>"$OUT/replica-$((FIRST + i)).log" 2>&1 &
    PIDS+=($!) JOBS+=($!)
done
STATUS=0
for ((i = 0; i < REPLICAS; i++)); do
    wait "${JOBS[$i]}" || {
        STATUS=$?
        say "replica $((FIRST + i)) ended with status $STATUS: see $OUT/replica-$((FIRST + i)).log" >&2
    }
done
[ "$STATUS" -ne 0 ] || say "all $REPLICAS replicas ended well: $OUT"
exit "$STATUS"
