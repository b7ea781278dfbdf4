#!/usr/bin/env bash
# One H200: SGLang alone against the same requests through the session proxy, and through proxy and SMG; what a real server
# answers to every call that RL360 makes. (The engine's contract tests on a real server: contract.sh.)
#
#   bash benchmarks/h200/fleet.sh [PART ...]       results under $OUT; parts, all of them when none is named:
#     record     the recording that tests/serving replays; weights by NCCL with a second GPU, or where one_gpu.sh can
#     8b         throughput with Qwen3-8B's shapes, 256 sessions
#     135m       the same with SmolLM2-135M, where the CPU is the limit
#     stop       turns that end with a code block, by its expression and fence by fence, at three caps
#     135m_stop  135m without SMG, 256 requests of up to 1024 tokens, each leg also with a stop at the closed code block
source "$(dirname "$0")/unpack.sh"
if [ $# -gt 0 ]; then parts=("$@"); else parts=(record 8b 135m stop 135m_stop); fi
out=${OUT:?a folder for results}
sessions=${RL360_SESSIONS:-256}
work=/tmp/rl360/fleet
mkdir -p "$work"
small=$RL360_MODELS/smollm2_135m
backends="--attention-backend triton --sampling-backend pytorch --grammar-backend none"
# Graphs of a few sizes: capturing one takes seconds, and nearly all steps have all sessions in them.
graphs="--cuda-graph-bs-decode 16 64 128 192 $sessions"
measure=(python3 benchmarks/serving_throughput.py --sessions "$sessions" --requests $((4 * sessions)) --rounds 2)
status=0
for part in "${parts[@]}"; do
    case $part in
        record) (
            gpus=$(python3 -c 'import torch; print(torch.cuda.device_count())')
            if [ "$gpus" -eq 1 ]; then source benchmarks/h200/one_gpu.sh || true; fi
            python3 benchmarks/h200/record_sglang.py --model "$small" --extra "$backends --mem-fraction-static 0.3" \
                --out "$out/sglang-recording.json" --logs "$work/record"
        ) || status=$? ;;
        8b) python3 benchmarks/h200/shapes.py qwen3_8b "$small" "$work/qwen3_8b"
            "${measure[@]}" --model "$work/qwen3_8b" --load-format dummy --extra "$backends $graphs --mem-fraction-static 0.8" \
                --logs "$work/8b" --out "$out/throughput-8b.json" || status=$? ;;
        135m) "${measure[@]}" --model "$small" --context-length 2048 --extra "$backends $graphs --mem-fraction-static 0.5" \
            --logs "$work/135m" --out "$out/throughput-135m.json" || status=$? ;;
        stop) python3 benchmarks/stop_throughput.py --model "$small" --sessions "$sessions" --extra "$backends $graphs --mem-fraction-static 0.5" \
            --budget-s "${RL360_BUDGET_S:-400}" --logs "$work/stop" --out "$out/throughput-stop.json" || status=$? ;;
        135m_stop) "${measure[@]}" --model "$small" --context-length 2048 --requests 256 --new-tokens 1024 --rounds 1 --gateways direct --stop-regex \
            --extra "$backends $graphs --mem-fraction-static 0.5" \
            --logs "$work/135m_stop" --out "$out/throughput-135m-stop.json" || status=$? ;;
        *) echo "fleet.sh: $part is no part; expected record, 8b, 135m, stop, 135m_stop" && exit 1 ;;
    esac
    mkdir -p "$out/logs-$part"
    for file in "$work/$part"/*.log; do tail -c 200000 "$file" > "$out/logs-$part/$(basename "$file")" || true; done
done
exit $status
