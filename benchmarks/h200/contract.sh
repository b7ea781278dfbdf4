#!/usr/bin/env bash
# The engine's contract tests (tests/gateway/embedded/test_server.py, marked `contract`) on a real SGLang with SmolLM2-135M.
#
#   bash benchmarks/h200/contract.sh [FLAGS OF THE SERVER]      results under $OUT
source "$(dirname "$0")/unpack.sh"
out=${OUT:?a folder for results}
port=${RL360_PORT:-30371}
python3 -m sglang.launch_server --model-path "$RL360_MODELS/smollm2_135m" --host 127.0.0.1 --port "$port" --dtype bfloat16 \
    --context-length 2048 --weight-version 0 --random-seed 0 --skip-server-warmup --attention-backend triton \
    --sampling-backend pytorch --grammar-backend none --disable-cuda-graph "${@:---mem-fraction-static=0.3}" \
    > "$out/contract-server.log" 2>&1 &
server=$!
trap 'kill $server 2>/dev/null || true' EXIT
for _ in $(seq 240); do
    curl -s -m 2 -o /dev/null "http://127.0.0.1:$port/model_info" && break || sleep 1
    kill -0 $server || { tail -n 40 "$out/contract-server.log"; exit 1; }
done
# The first request compiles kernels for longer than a test waits.
curl -s -m 200 "http://127.0.0.1:$port/generate" -H 'Content-Type: application/json' \
    -d '{"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 4}, "return_logprob": true}' > /dev/null
python3 -c 'from importlib.metadata import version
for name in ("sglang", "torch"): print(name, version(name))' | tee "$out/contract.txt"
RL360_SGLANG_URL="http://127.0.0.1:$port" python3 -m pytest -p no:cacheprovider -v -W ignore tests/gateway/embedded/test_server.py \
    -m contract 2>&1 | tee -a "$out/contract.txt"
