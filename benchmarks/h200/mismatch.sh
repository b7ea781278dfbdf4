#!/usr/bin/env bash
# One H200: how far SGLang's logprobs of SmolLM2-135M are from the trainer's, and both from fp32, by attention backend.
#
#   bash benchmarks/h200/mismatch.sh [VARIANT ...]       results under $OUT; variants as in benchmarks/mismatch.py
#
# fa3 needs sgl_kernel/flash_ops.abi3.so (of more.part*), fa4 the libraries of flash.part*; without them their rows say so,
# and the trainer has torch's kernel alone. FlashInfer compiles its kernels when its server starts, with nvcc.
source "$(dirname "$0")/unpack.sh"
out=${OUT:?a folder for results}
deadline=${RL360_DEADLINE_S:-520}
work=/tmp/rl360/mismatch
mkdir -p "$work"
if [ $# -eq 0 ]; then set -- triton fa3 fa4 flashinfer torch_native triton+deterministic fa3+deterministic; fi
# FlashInfer takes kernels of its own for prompts on this GPU, which include CUTLASS; without its headers, those of older GPUs.
[ -d /tmp/rl360/site/flashinfer/data/cutlass/include ] || export SGLANG_FLASHINFER_USE_PAGED=1
export MAX_JOBS=12  # compilers at once, of a few GiB each, beside the servers
# A start takes over a minute, so all start together. Each sees what the others have taken already of the GPU, so it is not
# a share of memory that bounds their caches, but a number of tokens. One size of graphs: nearly all steps have all attempts.
extra="--sampling-backend pytorch --grammar-backend none --mem-fraction-static 0.9 --max-total-tokens 65536"
extra+=" --max-running-requests 64 --cuda-graph-bs-decode 64"
status=0
timeout $((deadline - SECONDS)) python3 benchmarks/mismatch.py --model "$RL360_MODELS/smollm2_135m" --variants "$@" \
    --attempts 64 --tokens 256 --extra "$extra" --at-once $# --start-timeout-s 360 --sample-timeout-s 240 \
    --logs "$work/logs" --out "$out/mismatch.json" > "$out/mismatch.txt" || status=$?
cat "$out/mismatch.txt"
for log in "$work"/logs/*/*.log; do
    [ -f "$log" ] && { echo "==> $(basename "$(dirname "$log")")"; tail -c 60000 "$log"; } || true
done > "$out/servers.log"
exit $status
