#!/usr/bin/env bash
# Weights of an 8B to SGLang: `ipc` on one H200 that both sides share; `nccl` where there is a second one, also from
# trainer=megatron with two tensor ranks, the second beside the server.
#
#   bash benchmarks/h200/weight_sync.sh [SYNC ...]       results under $OUT; of ipc, disk, nccl, megatron, all when none is named
source "$(dirname "$0")/unpack.sh"
out=${OUT:?a folder for results}
work=/tmp/rl360/weight_sync
mkdir -p "$work"
python3 benchmarks/h200/shapes.py qwen3_8b "$RL360_MODELS/smollm2_135m" "$work/qwen3_8b"
common="--attention-backend triton --sampling-backend pytorch --grammar-backend none --cuda-graph-max-bs-decode 64"
if [ $# -eq 0 ]; then set -- ipc disk nccl megatron; fi
syncs=" $* "
asked() { [[ $syncs == *" $1 "* ]]; }
gpus=$(python3 -c 'import torch; print(torch.cuda.device_count())')
status=0
# Memory of one H200, GiB: trainer's weights 15, the server and the one that is started from the export 40 each.
for sync in ipc disk; do
    asked "$sync" || continue
    python3 benchmarks/weight_sync.py --model "$work/qwen3_8b" --sync "$sync" --device 0 --trainer-device 0 \
        --extra "$common --mem-fraction-static 0.3" --work "$work/$sync" --out "$out/sync-8b-$sync.json" || status=$?
done
if asked nccl && [ "$gpus" -ge 2 ]; then
    python3 benchmarks/weight_sync.py --model "$work/qwen3_8b" --sync nccl --device 1 --trainer-device 0 \
        --extra "$common --mem-fraction-static 0.3" --work "$work/nccl" --out "$out/sync-8b-nccl.json" || status=$?
fi
if asked megatron && [ "$gpus" -ge 2 ]; then  # 18 bytes a parameter over two GPUs: 74 GiB each
    python3 benchmarks/weight_sync.py --model "$work/qwen3_8b" --sync nccl --megatron 2 --device 1 --no-parity \
        --extra "$common --mem-fraction-static 0.3" --work "$work/megatron" --out "$out/sync-8b-nccl-megatron.json" || status=$?
fi
for sync in ipc disk nccl megatron; do
    for folder in logs logs-cold; do
        for file in "$work/$sync/$folder"/*.log; do
            [ -f "$file" ] && tail -c 100000 "$file" > "$out/$sync-$folder-$(basename "$file")" || true
        done
    done
done
exit $status
