#!/usr/bin/env bash
# Quickstart with five seeds side by side, each pinned to two cores of its own: the CPU path, no GPU used.
#
#   bash benchmarks/h200/seeds.sh       results under $OUT/seed-N
source "$(dirname "$0")/unpack.sh"
out=${OUT:?a folder for results}
pids=()
for seed in 0 1 2 3 4; do
    cores=$((2 * seed)),$((2 * seed + 1))
    CUDA_VISIBLE_DEVICES= taskset -c "$cores" python3 -m rl360.cli run experiment=quickstart seed="$seed" trainer.device=cpu \
        output_dir=/tmp/rl360/seed-"$seed" > /tmp/rl360/seed-"$seed".log 2>&1 &
    pids+=($!)
done
for pid in "${pids[@]}"; do wait "$pid" || true; done
lscpu | grep -E 'Model name|MHz|L3' > "$out/cpu.txt" || true
for seed in 0 1 2 3 4; do
    mkdir -p "$out/seed-$seed"
    cp /tmp/rl360/seed-"$seed"/metrics.jsonl /tmp/rl360/seed-"$seed"/summary.json "$out/seed-$seed/" || true
    tail -n 30 /tmp/rl360/seed-"$seed".log > "$out/seed-$seed/run.log" || true
done
python3 benchmarks/h200/seed_table.py "$out"
