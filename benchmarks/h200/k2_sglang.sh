#!/usr/bin/env bash
# K2 Horizon (tiny, random) under a real SGLang that lacks it, through rl360.models.sglang_external, against transformers.
#
#   bash benchmarks/h200/k2_sglang.sh       results under $OUT: k2_sglang.json and the server's log
source "$(dirname "$0")/unpack.sh"
out=${OUT:?a folder for results}
work=/tmp/rl360/k2_sglang
rm -rf "$work"
mkdir -p "$work"
status=0
python3 benchmarks/h200/k2_sglang.py "$work" 30361 > "$out/k2_sglang.json" || status=$?
cp "$work"/server.log "$out/k2_sglang-server.log" || true
cat "$out/k2_sglang.json"
exit $status
