#!/usr/bin/env bash
# One H200: do torch + embedded engine and Megatron + SGLang learn alike? 32 small coding tasks, three seeds each, the full
# stack (sandboxes, proxy; SMG, weights by CUDA IPC with checked hashes), all six runs side by side.
#
#   bash benchmarks/h200/gate.sh [ITERATIONS] [SEEDS]      results under $OUT: gate.md, gate.png, gate.json, gate.tgz
#
# Both sides get the same numbers, and benchmarks/same_setup.py fails the script when their configs differ in anything
# but who computes. Of the cores that the script may use (`taskset`, 15 at least) a run with the embedded engine has two
# fifths of a third (trials 50 ms of CPU each, the engine's thread), one with SGLang three fifths (the scheduler and the
# gateway beside them). `RL360_MEGATRON` adds to the second side.
RL360_DEADLINE_S=${RL360_DEADLINE_S:-560}
source "$(dirname "$0")/runs.sh"
iterations=${1:-16}
read -ra seeds <<< "${2:-0 1 2}"
common=(experiment=coding_overfit32_smollm2 "iterations=$iterations" group_size=8 tasks_per_iteration=32 evaluation=none
    'logger=[jsonl,console]' checkpoint.every=0 checkpoint.hf=false rollout.request_timeout_s=200 rollout.turn_timeout_s=240
    rollout.num_workers=4  # 256 trials an iteration took 18 s with two
    trainer.learning_rate=2e-5 trainer.warmup_steps=0 'trainer.betas=[0.9,0.98]' trainer.eps=1e-8 trainer.weight_decay=0.1
    trainer.max_grad_norm=1.0 trainer.max_tokens_per_gpu=8192 trainer.logprob_chunk_tokens=1024)
torch=(trainer=torch rollout=embedded gateway=direct rollout.max_running_requests=128)
megatron=(trainer=megatron trainer.num_gpus=1 rollout=sglang gateway=smg rollout.sync=ipc "${serving[@]}"
    rollout.sglang.max_running_requests=128)
if $dry; then
    common+=(model=tiny "model.path=$tiny" tasks_per_iteration=3 group_size=2 rollout.max_new_tokens=12 algorithm.filter=none
        rollout.num_workers=1 rollout.concurrency=4 trainer.max_tokens_per_gpu=1024)
    torch+=(trainer.device=cpu trainer.num_threads=1 rollout.max_running_requests=4 rollout.kv_cache_gib=0.1)
    megatron+=('allow_targets=[tests.]' trainer.rank_target=tests.trainers.megatron.cpu_rank:CpuRank
        rollout.sglang.max_running_requests=4)
    torch+=('allow_targets=[tests.]')
else
    torch+=(trainer.device=cuda rollout.kv_cache_gib=4)
    # Three servers measure the same GPU's free memory while others take some: a wide limit, and the cache's size by tokens.
    megatron+=('rollout.sglang.devices=[0]' rollout.sglang.mem_fraction_static=0.3 trainer.compile=false
        'rollout.sglang.extra_args=[--max-total-tokens,"65536",--cuda-graph-bs-decode,"8","32","64","128",--sleep-on-idle]')
fi
read -ra more <<< "${RL360_MEGATRON:-}"
megatron+=("${more[@]}")

python3 -m rl360.cli run "${common[@]}" "${torch[@]}" --cfg job --resolve > "$work/torch.yaml"
python3 -m rl360.cli run "${common[@]}" "${megatron[@]}" --cfg job --resolve > "$work/megatron.yaml"
python3 benchmarks/same_setup.py "$work/torch.yaml" "$work/megatron.yaml"

sample_gpus "$out/gpu.csv"
read -ra mine <<< "$(python3 -c 'import os; print(*sorted(os.sched_getaffinity(0)))')"
$dry && mine+=({0..14})  # not kept to: a dry run may have fewer
[ ${#mine[@]} -ge 15 ] || { echo "gate.sh: ${#mine[@]} cores, six runs need 15" && exit 1; }
each=$((${#mine[@]} / 3)) at=0
fewer=$((each * 2 / 5))
names=() torch_runs=() megatron_runs=()
join() { local IFS=,; echo "$*"; }
for seed in "${seeds[@]}"; do
    ports=(rollout.sglang.base_port=$((31000 + 10 * seed)) gateway.smg_port=$((31500 + seed))
        gateway.metrics_port=$((31600 + seed)))
    begin "megatron-$seed" "$(join "${mine[@]:at + fewer:each - fewer}")" "${common[@]}" "${megatron[@]}" "seed=$seed" \
        "${ports[@]}"
    begin "torch-$seed" "$(join "${mine[@]:at:fewer}")" "${common[@]}" "${torch[@]}" "seed=$seed"
    torch_runs+=("$work/torch-$seed") megatron_runs+=("$work/megatron-$seed") names+=("torch-$seed" "megatron-$seed")
    at=$(((at + each) % (3 * each)))
done
finish
recounts "${names[@]}"
pack "$out/gate.tgz" "${names[@]}"
status=0
python3 benchmarks/curves.py --arm 'torch + embedded' "${torch_runs[@]}" --arm 'Megatron + SGLang' "${megatron_runs[@]}" \
    --out "$out/gate" || status=1
for seed in "${seeds[@]}"; do
    python3 benchmarks/same_setup.py "$work/torch-$seed/resolved.yaml" "$work/megatron-$seed/resolved.yaml" || status=1
done
exit $status
