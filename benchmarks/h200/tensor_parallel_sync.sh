#!/usr/bin/env bash
# Weights to one SGLang server of two ranks (two H200s): every rank's slices are compared with what was sent, and a tensor
# that is damaged for one rank only must be named. An 8B by ipc and nccl, and the tests of hashes on a GPU.
#
#   bash benchmarks/h200/tensor_parallel_sync.sh       results under $OUT
source "$(dirname "$0")/unpack.sh"
out=${OUT:?a folder for results}
work=/tmp/rl360/tensor_parallel_sync
mkdir -p "$work"
python3 benchmarks/h200/shapes.py qwen3_8b "$RL360_MODELS/smollm2_135m" "$work/qwen3_8b"
extra="--attention-backend triton --sampling-backend pytorch --grammar-backend none --disable-cuda-graph --mem-fraction-static 0.3"
status=0
python3 -m pytest -q tests/weight_sync/test_on_gpu.py 2>&1 | tail -20 > "$out/test_on_gpu.txt" || status=$?
# The trainer's 15 GiB lie beside rank 0. A broadcast needs a GPU of its own for each of its ranks: three.
runs="ipc:0"
[ "$(python3 -c 'import torch; print(torch.cuda.device_count())')" -ge 3 ] && runs="$runs nccl:2"
for run in $runs; do
    sync=${run%:*}
    fault=$([ "$sync" = ipc ] && echo --fault || true)
    python3 benchmarks/weight_sync.py --model "$work/qwen3_8b" --sync "$sync" --tensor-parallel 2 --device 0 --device 1 \
        --trainer-device "${run#*:}" --requests 8 --syncs 3 --no-parity $fault --extra "$extra" \
        --work "$work/$sync" --out "$out/sync-8b-tp2-$sync.json" 2> "$out/sync-8b-tp2-$sync.err" || status=$?
    for file in "$work/$sync"/logs/*.log; do
        [ -f "$file" ] && tail -c 100000 "$file" > "$out/$sync-$(basename "$file")" || true
    done
done
exit $status
