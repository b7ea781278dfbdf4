#!/usr/bin/env bash
# Learning over several turns (experiment=repair_turns), three seeds side by side; beside them the learning-rate sweep and the
# trial benchmark. Everything on the CPU, each run pinned to two cores of its own.
#
#   bash benchmarks/h200/turns.sh       results under $OUT
source "$(dirname "$0")/unpack.sh"
out=${OUT:?a folder for results}
pids=()
for seed in 0 1 2; do
    CUDA_VISIBLE_DEVICES= taskset -c $((2 * seed)),$((2 * seed + 1)) python3 -m rl360.cli run experiment=repair_turns seed="$seed" \
        trainer.device=cpu output_dir=/tmp/rl360/turns-"$seed" > /tmp/rl360/turns-"$seed".log 2>&1 &
    pids+=($!)
done
CUDA_VISIBLE_DEVICES= taskset -c 6,7 python3 -m rl360.cli sweep learning_rate trainer.device=cpu paths.outputs=/tmp/rl360/sweep \
    > "$out/sweep.txt" 2>&1 &
pids+=($!)
CUDA_VISIBLE_DEVICES= taskset -c 8,9 python3 benchmarks/trials.py > "$out/trials.txt" 2>&1 &
pids+=($!)
for pid in "${pids[@]}"; do wait "$pid" || true; done
for seed in 0 1 2; do
    mkdir -p "$out/seed-$seed"
    cp /tmp/rl360/turns-"$seed"/metrics.jsonl /tmp/rl360/turns-"$seed"/summary.json "$out/seed-$seed/" || true
    tail -n 30 /tmp/rl360/turns-"$seed".log > "$out/seed-$seed/run.log" || true
done
tar czf "$out/sweep.tgz" -C /tmp/rl360/sweep --exclude=checkpoints --exclude=trajectories . || true
