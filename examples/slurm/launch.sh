#!/usr/bin/env bash
# Starts one node's ranks of a run on several nodes. Run it on every node, with the node's own number:
#
#   examples/slurm/launch.sh NODE NODES ADDRESS:PORT --config FILE [--section.key=value ...]
#
# NODE is 0 to NODES - 1. ADDRESS:PORT is that of node 0, as the others reach it; it is the same on all nodes.
# SIGTERM, SIGUSR1 or SIGHUP on any node lets all ranks save and end; the script then ends with status 0.
#
# The environment may set RANKS_PER_NODE (default: the node's GPUs), RUN_ID (separates runs that share an address),
# LOGS (the folder of the ranks' logs), LOCAL_ADDRESS (of this node, if the others cannot resolve its name) and PYTHON.
set -euo pipefail

if (($# < 4)); then
    sed -n '2,/^set/{/^set/!s/^# \{0,1\}//p;}' "$0" >&2
    exit 2
fi
node=$1 nodes=$2 endpoint=$3
shift 3
root=$(cd "$(dirname "$0")/../.." && pwd)
gpus=$(nvidia-smi --list-gpus 2>/dev/null | wc -l || true)
ranks=${RANKS_PER_NODE:-$((gpus > 0 ? gpus : 1))}

# SLURM sends a signal to every process of a step. torchrun could pass SIGUSR1 on (--signals-to-handle), but would then
# exit with 1 though the run was saved, and the job would not be requeued; so torchrun ignores it, and pass_on signals
# the ranks. torchrun always passes SIGTERM on, and kills the remaining ranks after this many seconds instead of 30.
trap '' USR1
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}

"${PYTHON:-python}" -m torch.distributed.run \
    --nnodes "$nodes" --nproc-per-node "$ranks" --max-restarts 0 \
    --rdzv-backend c10d --rdzv-endpoint "$endpoint" --rdzv-id "${RUN_ID:-sftron}" \
    --rdzv-conf "is_host=$((node == 0))" ${LOCAL_ADDRESS:+--local-addr "$LOCAL_ADDRESS"} \
    --log-dir "${LOGS:-logs}/node-$node" --tee 3 \
    "$root/run_train.py" "$@" &
torchrun=$!

# Prints torchrun's processes that handle SIGTERM already; a rank whose Python has not started would die of it. It reads
# /proc because small images have no pkill.
ranks_of_torchrun() {
    local file line parent pid caught
    for file in /proc/[0-9]*/stat; do
        { read -r line <"$file"; } 2>/dev/null || continue # it has ended meanwhile
        # PID (NAME) STATE PARENT ..., where NAME may hold anything
        read -r _ parent _ <<<"${line##*) }"
        [[ $parent == "$torchrun" ]] || continue
        pid=${file//[!0-9]/}
        caught=$(sed -n 's/^SigCgt:[[:space:]]*//p' "/proc/$pid/status" 2>/dev/null || true)
        if ((16#${caught:-0} & 0x4000)); then echo "$pid"; fi
    done
}
# Signals the ranks as soon as there are any. torchrun gets no signal: it would exit with 1 though the run was saved.
pass_on() {
    signalled=1
    # shellcheck disable=SC2046  # one word each
    until kill -TERM $(ranks_of_torchrun) 2>/dev/null || ! kill -0 "$torchrun" 2>/dev/null; do sleep 0.5; done
}
signalled=
trap pass_on TERM USR1 HUP

until wait "$torchrun"; do
    status=$?
    # A signal also ends the wait; the next wait returns torchrun's status, even if it has ended already.
    if [[ -z $signalled ]]; then exit "$status"; fi
    signalled=
done
