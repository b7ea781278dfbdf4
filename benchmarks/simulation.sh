#!/usr/bin/env bash
# Does `rl360 simulate` predict a run that it has not seen? On a CPU, with a real model: attempts whose verifier takes a
# log-normal time (median 2 s, one in ten above 6.5 s, at most 15 s), as slow tests do. A run with max_staleness 0 is what the simulator
# knows; runs with 1 and with 2 are predicted from it, and the script fails when one is not within 15 %. On an idle machine: it is a
# prediction of waiting, and takes the steps to be as long as they were.
#
#   OUT=FOLDER bash benchmarks/simulation.sh [ITERATIONS]      about 15 minutes on two cores; FOLDER/simulation-{1,2}.{md,json}
#
# The trainer has a thread, and the server, a process of its own, another.
set -euo pipefail
out=${OUT:?a folder for results}
iterations=${1:-20}
root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root"
export PATH="$root/.venv/bin:$PATH" OMP_NUM_THREADS=1
work=$(mktemp -d)
mkdir -p "$out"
python3 -m rl360.cli run tasks=quickstart --cfg job --resolve > "$work/config.yaml"
cp -r "$(dirname "$(python3 -c 'import sys, yaml; print(yaml.safe_load(open(sys.argv[1]))["tasks"]["path"])' "$work/config.yaml")")" "$work/tasks"
for test in "$work"/tasks/*/tests/test.sh; do
    sed -i '/^exec /i sleep "$(python3 -I -S -c "import random; print(min(15, random.lognormvariate(0.69, 0.92)))")"' "$test"
done
common=(experiment=quickstart "tasks.path=$work/tasks/quickstart.jsonl" algorithm=grpo_async "iterations=$iterations" evaluation=none
    'logger=[jsonl,console]' checkpoint.every=0 checkpoint.hf=false algorithm.filter=none rollout.concurrency=96
    trainer.num_threads=1 rollout=sglang 'rollout.sglang.command=[python3,-m,rl360.gateway.embedded.serve]'
    rollout.sglang.dtype=float32 'rollout.sglang.extra_args=[--threads,"1",--kv-cache-gib,"1"]' rollout.sglang.max_running_requests=96)
for staleness in 0 1 2; do
    echo "$(date +%T) max_staleness $staleness"
    python3 -m rl360.cli run "${common[@]}" "rollout.max_staleness=$staleness" "output_dir=$work/ahead-$staleness" > "$out/ahead-$staleness.log" 2>&1 ||
        { tail -5 "$out/ahead-$staleness.log"; exit 1; }
done
status=0
for staleness in 1 2; do
    python3 benchmarks/loops.py --out "$out/simulation-$staleness" --predict "$work/ahead-0" "$work/ahead-$staleness" \
        "$work/ahead-0" "$work/ahead-$staleness" || status=1
done
exit $status
