#!/usr/bin/env bash
# H200s: the trainer's side alone, by parts. Each has a time limit of its own and is usable without the others.
#
#   bash benchmarks/h200/train.sh PART[=SECONDS] ...    one after the other, on the GPUs that are visible
#     step        a train step at 8K and 32K, our own layers and Transformer Engine's    step-{own,te}-{20,16}.json
#     memory      peaks of other shapes: K2 Horizon's, and full recomputation at 32K      memory-{k2,recompute}.json
#     context     one of four context ranks at 128K                                       context-4.json
#     parity      gradients, layouts, offload and published weights against fp32 on the CPU
#     te          the tests of Transformer Engine's layers
#     tests       every other test that is marked gpu, but for those of `offload`
#     checkpoint  save, write beside a step, restore under another layout, compared       checkpoint.json
#     offload     a trainer's memory to the host and back, and its tests
#     head        the head with fp32 logits and with rounded ones
# Results under $OUT: those, and log.txt with what every program said, which holds all of the other parts.
# Parts of more than one program share their GPUs; `step`, `context`, `offload` and `head` are timings and want a GPU alone.
# On one GPU the tests for two are left out. RL360_DRY=1 runs on a CPU what can; the rest says its --help or collects its tests.
source "$(dirname "$0")/runs.sh"
[ $# -gt 0 ] || { sed -n '2,/^source/{/^#/p}' "$0" && exit 1; }
export RL360_TEST_REQUIRE=${RL360_TEST_REQUIRE-gpu} TORCHINDUCTOR_COMPILE_THREADS=${TORCHINDUCTOR_COMPILE_THREADS:-4}
gpus=1
$dry || gpus=$(python3 -c 'import torch; print(torch.cuda.device_count())')
rm -f "$work"/*.txt
status=0 begun=()

# beside NAME PROGRAM...: begins it, until the part's time is over. meet: waits for all that were begun.
beside() {
    local name=$1 left=$((part_ends - SECONDS))
    shift
    if [ "$left" -le 0 ]; then
        echo "$name: not started, the time is over" | tee "$work/$name.txt"
        status=1
        return 0
    fi
    timeout --foreground --signal=TERM --kill-after=20 "$left" "$@" > "$work/$name.txt" 2>&1 &
    pids+=($!) begun+=("$name $SECONDS")
}
meet() {
    local at code name since
    for at in "${!pids[@]}"; do
        code=0
        wait "${pids[$at]}" || code=$?
        read -r name since <<< "${begun[$at]}"
        echo "$(date +%T) $name ended with $code within $((SECONDS - since)) s" | tee -a "$work/$name.txt"
        [ "$code" = 0 ] || status=1
    done
    pids=() begun=()
    collect
}
say() {
    beside "$@"
    meet
}

collect() {
    local file
    for file in "$work"/*.txt; do
        [ -f "$file" ] || continue
        printf '\n======== %s\n' "$(basename "$file" .txt)"
        tail -c 60000 "$file"
    done > "$out/log.txt"
}
trap 'collect; end_all' EXIT

# Only for programs that need it: Megatron changes where Transformer Engine can be imported.
with_te=(env "PYTHONPATH=$PYTHONPATH:/tmp/rl360/te")
steps=(python3 benchmarks/train_step.py)
tests=(python3 -m pytest -q -p no:cacheprovider -W ignore -rs --timeout 230 --durations 8 -m gpu)
files=(python3 benchmarks/megatron_checkpoint.py --json "$out/checkpoint.json")
hand_over=(python3 benchmarks/offload.py)
head=(python3 benchmarks/head.py --logits both)
if $dry; then
    steps+=(--help)
    tests+=(--collect-only)
    files+=(--rank-target tests.trainers.megatron.cpu_rank:CpuRank --layers 2 --tokens 64 --config '{"hidden_size": 32,
        "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 97}')
    hand_over+=(--device cpu --gib 0.05 --cycles 2)
    head+=(--device cpu --vocab 1000 --hidden 32 --positions 64 --chunks 32 --repeats 2)
else
    # 1.0 billion parameters: two copies of 15 GB on the disk (64 GiB on a host of one GPU, the unpacked bundle on it).
    files+=(--layers 4 --config '{"vocab_size": 32768}')
    [ "$gpus" = 1 ] || files+=(--num-gpus 2 --save tensor_parallel_size=2 --restore)
    hand_over+=(--gib 32 --cycles 3)
    head+=(--chunks 1024 2048 4096)
fi

step() {
    local layers cases taken
    for layers in 20 16; do
        if [ "$layers" = 20 ]; then cases=(8192x8 8192x1); else cases=(32768x1); fi
        say "step-own-$layers" "${steps[@]}" --layers "$layers" --cases "${cases[@]}" --steps 4 \
            --json "$out/step-own-$layers.json"
        taken=()
        if [ "$(grep -cs '"total"' "$out/step-own-$layers.json")" = ${#cases[@]} ]; then
            taken=(--roofline-of "$out/step-own-$layers.json")
        fi
        say "step-te-$layers" "${with_te[@]}" "${steps[@]}" --transformer-engine --layers "$layers" --cases "${cases[@]}" --steps 4 \
            "${taken[@]}" --json "$out/step-te-$layers.json"
    done
}

# Side by side: peaks are of a process's own tensors.
memory() {
    $dry || python3 benchmarks/h200/shapes.py k2_horizon_7b "$RL360_MODELS/smollm2_135m" "$work/k2"
    beside memory-k2 "${steps[@]}" --config "$work/k2/config.json" --layers 4 --cases 8192x2 --steps 1 --no-roofline \
        --json "$out/memory-k2.json"
    beside memory-recompute "${steps[@]}" --recompute full --layers 8 --cases 32768x1 --steps 1 --no-roofline \
        --json "$out/memory-recompute.json"
    meet
}

context() {
    say context-4 "${steps[@]}" --one-of-context 4 --layers 12 --cases 131072x1 --steps 2 --warmup 1 \
        --json "$out/context-4.json"
}

parity() {
    local number family
    for number in 1 2; do
        [ "$number" -le "$gpus" ] || $dry || continue
        for family in llama qwen3 k2_horizon; do
            beside "parity-$number-$family" "${tests[@]}" tests/trainers/megatron/test_on_gpus.py -k "gradients and $number-$family"
        done
        beside "parity-$number-rest" "${tests[@]}" tests/trainers/megatron/test_on_gpus.py -k "not gradients and $number"
    done
    meet
}

te() {
    local number
    beside te-layers "${with_te[@]}" "${tests[@]}" tests/models/megatron/test_te_on_gpu.py -k "hidden or weights"
    for number in 1 2; do
        [ "$number" -le "$gpus" ] || $dry || continue
        beside "te-$number-gradient" "${with_te[@]}" "${tests[@]}" tests/models/megatron/test_te_on_gpu.py -k "gradient_of and $number-"
        beside "te-$number-checkpoint" "${with_te[@]}" "${tests[@]}" tests/models/megatron/test_te_on_gpu.py -k "checkpoint and $number-"
    done
    meet
}

others() {
    local found
    mapfile -t found < <(grep -rl 'pytest.mark.gpu' tests --include='test_*.py' |
        grep -v -e megatron/test_on_gpus -e megatron/test_te_on_gpu -e test_offload | sort)
    say tests "${tests[@]}" "${found[@]}"
}

for asked in "$@"; do
    part=${asked%%=*}
    case $part in
        step) limit=480 ;;
        context | tests) limit=240 ;;
        parity | te) limit=260 ;;
        checkpoint) limit=280 ;;
        offload | head | memory) limit=150 ;;
        *) echo "train.sh: $part is no part; expected step, memory, context, parity, te, tests, checkpoint, offload, head" && exit 1 ;;
    esac
    [ "$part" = "$asked" ] || limit=${asked#*=}
    part_ends=$((SECONDS + limit))
    case $part in
        tests) others ;;
        checkpoint) say checkpoint "${files[@]}" ;;
        offload)
            say offload "${hand_over[@]}"
            say offload-torch "${hand_over[@]}" --torch
            say offload-tests "${tests[@]}" tests/trainers/test_offload.py
            ;;
        head) say head "${head[@]}" ;;
        *) "$part" ;;
    esac
done
exit $status
