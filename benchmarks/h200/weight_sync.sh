#!/usr/bin/env bash
# Weights of an 8B to SGLang: `ipc` on one H200 that both sides share; `nccl` from one H200 to another, also from
# trainer=megatron with two tensor ranks, the second beside the server.
#
#   bash benchmarks/h200/weight_sync.sh [SYNC ...]       results under $OUT; of ipc, disk, nccl, megatron, all when none is named
#
# On a host of one GPU `nccl` and `megatron` (12 layers, so that it fits) run on the one, where one_gpu.sh can: whether
# they are right, not how long they take. RL360_SYNCS: timed syncs of each (5).
source "$(dirname "$0")/unpack.sh"
out=${OUT:?a folder for results}
work=/tmp/rl360/weight_sync
mkdir -p "$work"
python3 benchmarks/h200/shapes.py qwen3_8b "$RL360_MODELS/smollm2_135m" "$work/qwen3_8b"
common="--attention-backend triton --sampling-backend pytorch --grammar-backend none --cuda-graph-max-bs-decode 64"
gpus=$(python3 -c 'import torch; print(torch.cuda.device_count())')
if [ $# -eq 0 ]; then
    set -- ipc disk nccl megatron
    # Without what one_gpu.sh needs the last two are left out, unless they are asked for.
    [ "$gpus" -ge 2 ] || [ -e /tmp/rl360/nccl/libnccl.so.2 ] || set -- ipc disk
fi
status=0
# measure NAME MODEL SYNC DEVICE SHARE [FLAG ...]: a server on DEVICE with that share of its memory, the trainer on GPU 0.
measure() {
    python3 benchmarks/weight_sync.py --model "$work/$2" --sync "$3" --device "$4" --trainer-device 0 --syncs "${RL360_SYNCS:-5}" \
        --extra "$common --mem-fraction-static $5" --work "$work/$1" --out "$out/sync-$1.json" "${@:6}" || status=$?
    for folder in logs logs-cold; do
        for file in "$work/$1/$folder"/*.log; do
            [ -f "$file" ] && tail -c 100000 "$file" > "$out/$1-$folder-$(basename "$file")" || true
        done
    done
    rm -rf "${work:?}/$1/weights" "${work:?}/$1/export"
}
for sync in "$@"; do
    case $sync in
        # Memory of one H200, GiB: trainer's weights 15, the server and the one that is started from the export 28 each.
        ipc | disk) measure "8b-$sync" qwen3_8b "$sync" 0 0.2 ;;
        nccl)
            if [ "$gpus" -ge 2 ]; then
                measure 8b-nccl qwen3_8b nccl 1 0.3
            else
                (source benchmarks/h200/one_gpu.sh && measure 8b-nccl-one-gpu qwen3_8b nccl 0 0.2 && exit $status) || status=$?
            fi ;;
        megatron) # 18 bytes a parameter: of 8B 74 GiB on each of two GPUs, of 12 layers 64 GiB on one
            if [ "$gpus" -ge 2 ]; then
                measure 8b-nccl-megatron qwen3_8b nccl 1 0.3 --megatron 2 --no-parity
            else
                python3 benchmarks/h200/shapes.py qwen3_8b "$RL360_MODELS/smollm2_135m" "$work/qwen3_8b_12" 12
                (source benchmarks/h200/one_gpu.sh && measure 12-layers-nccl-megatron-one-gpu qwen3_8b_12 nccl 0 0.2 --megatron 2 --no-parity &&
                    exit $status) || status=$?
            fi ;;
        *) echo "weight_sync.sh: $sync is none; expected ipc, disk, nccl, megatron" && exit 1 ;;
    esac
done
exit $status
