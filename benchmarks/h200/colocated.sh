#!/usr/bin/env bash
# One H200 that trainer and SGLang cannot have at the same time: Megatron and a server take turns with its memory.
#
#   bash benchmarks/h200/colocated.sh [PART ...]     results under $OUT; parts, all of them when none is named:
#     fail     the same experiment without rollout.sglang.colocated: ends in its first step, out of memory, as it should
#     run      three iterations with it
#     canary   SmolLM2 at learning rate 0 over five hand-overs: weights and mismatch must stay what they are
#
# Qwen3-8B's shape with 8 of its 36 layers: a step takes 75 GiB of the H200's 139.8,
# and a server at SGLang's usual share of 0.8 more than 100.
# Rewards are a function of the sampled ids: random weights solve nothing, and without rewards no gradient would flow.
source "$(dirname "$0")/runs.sh"
if [ $# -gt 0 ]; then parts=("$@"); else parts=(fail run canary); fi
common=(experiment=tiny_e2e 'allow_targets=[tests.]' '+reward.tokens._target_=tests.e2e.token_reward.TokenReward'
    'logger=[jsonl,console]' checkpoint.every=0 checkpoint.at_end=false checkpoint.hf=false
    trainer=megatron trainer.num_gpus=1 trainer.compile=false
    trainer.async_checkpoint=false rollout=sglang rollout.sync=ipc "${serving[@]}")
if $dry; then
    python3 benchmarks/h200/shapes.py qwen3_narrow "$tiny" "$work/shape"
    common+=("model.path=$work/shape" trainer.rank_target=tests.trainers.megatron.cpu_rank:CpuRank)
    big=(trainer.max_tokens_per_gpu=1024)
    small=(model.path="$tiny" model.random_init=false)
else
    python3 benchmarks/h200/shapes.py qwen3_8b "$RL360_MODELS/smollm2_135m" "$work/shape" 8
    common+=("model.path=$work/shape" rollout.num_workers=4 rollout.concurrency=64 rollout.max_context_tokens=2048
        rollout.sglang.mem_fraction_static=0.8 rollout.sglang.max_running_requests=64
        'rollout.sglang.extra_args=[--cuda-graph-bs-decode,"8","64"]')
    # 64 attempts of about 690 tokens: two micro-batches of 22,528.
    big=(tasks_per_iteration=16 group_size=4 rollout.max_new_tokens=560 trainer.max_tokens_per_gpu=22528
        trainer.learning_rate=1e-6)
    small=(model=smollm2_135m "model.path=$RL360_MODELS/smollm2_135m" tasks=overfit32 tasks_per_iteration=16 group_size=4
        rollout.max_new_tokens=96 trainer.max_tokens_per_gpu=8192
        # So that it may run beside other things on the GPU.
        rollout.sglang.mem_fraction_static=0.5
        'rollout.sglang.extra_args=[--max-total-tokens,"65536",--cuda-graph-bs-decode,"8","64"]')
fi
cores=$(taskset -pc $$ | sed 's/.*: //') names=()
for part in "${parts[@]}"; do
    program=(python3 benchmarks/colocated.py --out "$out/colocated-$part.json")
    case $part in
        fail) begin fail $cores "${common[@]}" "${big[@]}" iterations=1 'rollout.sglang.devices=[0]' ;;
        run) begin run $cores "${common[@]}" "${big[@]}" iterations=3 rollout.sglang.colocated=true ;;
        canary) begin canary $cores "${common[@]}" "${small[@]}" iterations=5 rollout.sglang.colocated=true \
            trainer.learning_rate=0 mismatch.stop=true ;;
        *) echo "colocated.sh: $part is no part; expected fail, run, canary" && exit 1 ;;
    esac
    finish
    names+=("$part")
    tail -n 6 "$work/$part.log"
done
recounts "${names[@]}"
pack "$out/colocated.tgz" "${names[@]}"
