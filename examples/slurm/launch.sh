#!/usr/bin/env bash
# One node's part of a run on several nodes. On every node, with its own number:
#
#   examples/slurm/launch.sh NODE NODES ADDRESS:PORT --config FILE [--section.key=value ...]
#
# NODE: 0 to NODES - 1. ADDRESS:PORT: of node 0, as the others reach it; the same on all nodes.
# SIGTERM, SIGUSR1 or SIGHUP, on any of the nodes: all ranks save and end, and so does this, with status 0.
#
# From the environment: RANKS_PER_NODE (the node's GPUs), RUN_ID (tells apart what shares an address), LOGS (folder for
# what each rank says), LOCAL_ADDRESS (of this node, where the others cannot resolve its name), PYTHON.
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

# SLURM sends a signal to every process of a step. torchrun would pass SIGUSR1 on (--signals-to-handle), but then exit
# with 1 though the run was saved, and the job would not be requeued; so it ignores it, and the ranks get it from below.
# SIGTERM it passes on in any case, and kills what is left after this many seconds instead of 30.
trap '' USR1
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}

"${PYTHON:-python}" -m torch.distributed.run \
    --nnodes "$nodes" --nproc-per-node "$ranks" --max-restarts 0 \
    --rdzv-backend c10d --rdzv-endpoint "$endpoint" --rdzv-id "${RUN_ID:-sftron}" \
    --rdzv-conf "is_host=$((node == 0))" ${LOCAL_ADDRESS:+--local-addr "$LOCAL_ADDRESS"} \
    --log-dir "${LOGS:-logs}/node-$node" --tee 3 \
    "$root/run_train.py" "$@" &
torchrun=$!

# Those of torchrun's processes that listen by now: a rank that Python has not begun in would die of SIGTERM. From /proc,
# as small images have no pkill.
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
# To the ranks, not to torchrun, which would exit with 1 though the run was saved; as soon as there are any.
pass_on() {
    signalled=1
    # shellcheck disable=SC2046  # one word each
    until kill -TERM $(ranks_of_torchrun) 2>/dev/null || ! kill -0 "$torchrun" 2>/dev/null; do sleep 0.5; done
}
signalled=
trap pass_on TERM USR1 HUP

until wait "$torchrun"; do
    status=$?
    # A signal ends the waiting as well; the next one tells how torchrun ended, also if it has by now.
    if [[ -z $signalled ]]; then exit "$status"; fi
    signalled=
done
