#!/usr/bin/env bash
# One H200: SGLang alone against the same requests through the session proxy, and through proxy and SMG; what a real server
# answers to every call that RL360 makes. (The engine's contract tests on a real server: lookahead.sh.)
#
#   bash benchmarks/h200/fleet.sh [SESSIONS]       results under $OUT
source "$(dirname "$0")/unpack.sh"
sessions=${1:-256}
out=${OUT:?a folder for results}
work=/tmp/rl360/fleet
mkdir -p "$work"
backends="--attention-backend triton --sampling-backend pytorch --grammar-backend none"
python3 benchmarks/h200/shapes.py qwen3_8b "$RL360_MODELS/smollm2_135m" "$work/qwen3_8b"
status=0
python3 benchmarks/h200/record_sglang.py --model "$RL360_MODELS/smollm2_135m" --extra "$backends --mem-fraction-static 0.3" \
    --out "$out/sglang-recording.json" --logs "$work/record" || status=$?
python3 benchmarks/serving_throughput.py --model "$work/qwen3_8b" --load-format dummy --sessions "$sessions" \
    --requests $((4 * sessions)) --extra "$backends --mem-fraction-static 0.8 --disable-prefill-cuda-graph \
    --cuda-graph-max-bs-decode $sessions" --logs "$work/8b" --out "$out/throughput-8b.json" || status=$?
python3 benchmarks/serving_throughput.py --model "$RL360_MODELS/smollm2_135m" --sessions "$sessions" \
    --requests $((4 * sessions)) --extra "$backends --mem-fraction-static 0.5 --cuda-graph-max-bs-decode $sessions" \
    --context-length 2048 --logs "$work/135m" --out "$out/throughput-135m.json" || status=$?
for logs in record 8b 135m; do
    mkdir -p "$out/logs-$logs"
    for file in "$work/$logs"/*.log; do tail -c 200000 "$file" > "$out/logs-$logs/$(basename "$file")" || true; done
done
exit $status
