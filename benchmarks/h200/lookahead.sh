#!/usr/bin/env bash
# The first look at a real engine: three iterations with SGLang 0.5.16 by URL, weights by disk, trainer on the same H200.
#
#   bash benchmarks/h200/lookahead.sh [ITERATIONS]      results under $OUT
source "$(dirname "$0")/unpack.sh"
iterations=${1:-3}
out=${OUT:?a folder for results}
port=30000
python3 -m rl360.cli doctor > "$out/doctor.txt" 2>&1 || true

python3 -m sglang.launch_server --model-path "$RL360_MODELS/smollm2_135m" --host 127.0.0.1 --port $port --dtype bfloat16 \
    --context-length 2048 --weight-version 0 --random-seed 0 --skip-server-warmup --mem-fraction-static 0.3 \
    --attention-backend triton --sampling-backend pytorch --grammar-backend none --disable-cuda-graph \
    > "$out/sglang.log" 2>&1 &
server=$!
trap 'kill $server 2>/dev/null || true' EXIT
for _ in $(seq 240); do
    python3 - <<P && break || sleep 1
import sys, urllib.request
try:
    urllib.request.urlopen("http://127.0.0.1:$port/model_info", timeout=2)
except OSError:
    sys.exit(1)
P
    kill -0 $server || { tail -n 40 "$out/sglang.log"; exit 1; }
done
# The first request compiles kernels for longer than a test waits.
curl -s -m 200 "http://127.0.0.1:$port/generate" -H 'Content-Type: application/json' \
    -d '{"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 4}, "return_logprob": true}' > /dev/null || true
RL360_SGLANG_URL="http://127.0.0.1:$port" python3 -m pytest -p no:cacheprovider -v tests/gateway/embedded/test_server.py \
    -m contract > "$out/contract.txt" 2>&1 || true
python3 -m pytest -p no:cacheprovider -q -m gpu tests/trainers > "$out/gpu_tests.txt" 2>&1 || true
python3 -m rl360.cli run experiment=quickstart rollout=external "rollout.engine_urls=[http://127.0.0.1:$port]" \
    iterations="$iterations" trainer.device=cuda trainer.max_tokens_per_gpu=16384 evaluation=none output_dir=/tmp/rl360/run \
    2>&1 | tee "$out/run.log" || true
cp /tmp/rl360/run/{metrics.jsonl,summary.json,resolved.yaml} "$out/" || true
cp /tmp/rl360/run/logs/driver.log "$out/driver.log" || true
python3 -m rl360.diagnostics.recount /tmp/rl360/run | tee "$out/recount.txt" || true
# Last: some of these calls leave the server unusable.
timeout 900 python3 benchmarks/h200/record_sglang.py "http://127.0.0.1:$port" > "$out/sglang_replies.json" || true
