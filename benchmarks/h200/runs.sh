# Sourced: runs of RL360 side by side, each on cores of its own and within one deadline; what they wrote, whatever happened.
#
# In: $OUT; RL360_DEADLINE_S, seconds from now after which every run is ended (default 520); RL360_WORK, the folder of the
# runs (default: by the script's name; two of one script on a host need one each). With RL360_DRY=1 nothing is unpacked and
# no GPU is used: tiny random models, and the embedded engine in the place of SGLang's servers.
# Out: `dry` (true or false), `work` (folder of the runs), `tiny` (a random model, dry only), and the functions below.
set -euo pipefail
out=${OUT:?a folder for results}
deadline=$((SECONDS + ${RL360_DEADLINE_S:-520}))
dry=false
if [ -n "${RL360_DRY:-}" ]; then
    dry=true
    export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PATH="$PWD/.venv/bin:$PATH" OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1
    export CUDA_VISIBLE_DEVICES= HARBOR_TELEMETRY=0 LITELLM_LOCAL_MODEL_COST_MAP=True TOKENIZERS_PARALLELISM=false
    work=$(mktemp -d)
    tiny=$work/tiny
    python3 -m rl360.cli model tiny --out "$tiny" > /dev/null
else
    source "$(dirname "${BASH_SOURCE[0]}")/unpack.sh"
    work=${RL360_WORK:-/tmp/rl360/$(basename "$0" .sh)}
    mkdir -p "$work"
fi
mkdir -p "$out"
# SGLang's flags on this host, and the embedded engine's in the place of a server.
if $dry; then
    serving=('rollout.sglang.command=[python3,-m,rl360.gateway.embedded.serve]' rollout.sglang.dtype=float32
        'rollout.sglang.extra_args=[--threads,"1",--kv-cache-gib,"0.1"]')
else
    serving=(rollout.sglang.dtype=bfloat16 rollout.sglang.attention_backend=triton rollout.sglang.sampling_backend=pytorch
        rollout.sglang.grammar_backend=none)
fi
pids=() background=()
program=(python3 -m rl360.cli run)

# begin NAME CORES [key=value ...]: a run of `program` in $work/NAME, its output in $work/NAME.log.
begin() {
    local name=$1 cores=$2 left=$((deadline - SECONDS))
    shift 2
    $dry && cores=0-$(($(nproc --all) - 1))
    [ "$left" -gt 0 ] || { echo "$name: not started, the time is over"; return 0; }
    # To the driver alone: it ends its servers, ranks and workers itself.
    taskset -c "$cores" timeout --foreground --signal=TERM --kill-after=20 "$left" \
        "${program[@]}" "$@" output_dir="$work/$name" > "$work/$name.log" 2>&1 &
    pids+=($!)
    echo "$(date +%T) $name on cores $cores, at most $left s"
}

# finish: wait for every run that was begun; a run's failure is in its log.
finish() {
    local pid
    for pid in "${pids[@]}"; do wait "$pid" || echo "process $pid ended with $?"; done
    pids=()
    echo "$(date +%T) finished"
}

# sample_gpus FILE: memory (MiB) and use of every GPU, four times a second, until the script ends.
sample_gpus() {
    command -v nvidia-smi > /dev/null || return 0
    nvidia-smi ${CUDA_VISIBLE_DEVICES:+-i "$CUDA_VISIBLE_DEVICES"} --query-gpu=timestamp,index,memory.used,utilization.gpu --format=csv,noheader,nounits -lms 250 > "$1" &
    background+=($!)
}

# pack FILE NAME...: what these runs wrote, without weights and without trajectories of more than 8 MiB, as one archive.
pack() {
    local file=$1 name folder
    shift
    folder=$(mktemp -d)
    for name in "$@"; do
        mkdir -p "$folder/$name"
        cp "$work/$name"/{metrics.jsonl,summary.json,resolved.yaml,recount.txt} "$folder/$name/" 2> /dev/null || true
        [ "$(du -sm "$work/$name/trajectories" 2> /dev/null | cut -f1)" -le 8 ] 2> /dev/null && cp -r "$work/$name/trajectories" "$folder/$name/"
        tail -c 200000 "$work/$name.log" > "$folder/$name/run.log" 2> /dev/null || true
        for log in "$work/$name"/logs/*.log; do
            [ -f "$log" ] && tail -c 200000 "$log" > "$folder/$name/$(basename "$log")" || true
        done
    done
    tar czf "$file" -C "$folder" .
    rm -r "$folder"
}

# recounts NAME...: the independent recount of each run, in its folder.
recounts() {
    local name
    for name in "$@"; do
        [ -d "$work/$name" ] || continue
        timeout 60 python3 -m rl360.diagnostics.recount "$work/$name" > "$work/$name/recount.txt" 2>&1 || true
    done
}

end_all() {
    local pid
    for pid in "${pids[@]}" "${background[@]}"; do kill "$pid" 2> /dev/null || true; done
    for pid in "${pids[@]}"; do wait "$pid" 2> /dev/null || true; done
    $dry && rm -rf "$work"
    return 0
}
trap end_all EXIT
trap 'exit 143' TERM INT
