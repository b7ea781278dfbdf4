#!/usr/bin/env bash
# Two H200 of one host, three loops over the same samples, one after the other:
#     colocated   synchronous: Megatron with data parallel 2 and two servers take turns on both GPUs, weights by CUDA IPC
#     onpolicy    trainer on one GPU, a server on the other, weights by NCCL, max_staleness 0
#     ahead       the same with rollouts that run ahead of the trainer (asynchronous)
# and whether `rl360 simulate`, which has seen `onpolicy` alone, predicts the iteration of `ahead` within 15 %.
#
#   bash benchmarks/h200/separate.sh [ITERATIONS] [MAX_STALENESS]    results under $OUT: separate.md, .json, separate.tgz
#
# Attempts of up to three turns (write, look at the public examples, repair), whose lengths differ: a synchronous loop waits
# for the longest of each iteration. All three use the algorithm for stale samples, which does nothing to fresh ones.
# RL360_LOOPS="colocated" makes some of them alone, beside what earlier calls have left in $RL360_WORK.
# With RL360_PAIRS="0,1 2,3" (four GPUs) the first two run side by side, each with its pair and its half of the cores.
# On a host of one GPU the trainer and the server of `onpolicy` and `ahead` share it, where one_gpu.sh can: whether the
# loop is right and the simulator predicts it, not what a second GPU is worth; `colocated` is left out.
source "$(dirname "$0")/runs.sh"
loops=${RL360_LOOPS:-onpolicy ahead colocated}
command=()
if ! $dry && [ "$(python3 -c 'import torch; print(torch.cuda.device_count())')" = 1 ]; then
    case " ${RL360_LOOPS:-} " in *" colocated "*) echo "separate.sh: colocated needs two GPUs" && exit 1 ;; esac
    source benchmarks/h200/one_gpu.sh
    loops=${RL360_LOOPS:-onpolicy ahead}
    command=("rollout.sglang.command=[$on_gpu_0,python3,-m,sglang.launch_server]")
    program=(env CUDA_VISIBLE_DEVICES=0,1 "${program[@]}") # of which CUDA shows the first
fi
iterations=${1:-12}
staleness=${2:-1}
common=(experiment=repair_turns algorithm=grpo_async "iterations=$iterations" tasks=small_coding_repair
    'tasks.include=[]' tasks_per_iteration=16 group_size=8 rollout.max_new_tokens=96 rollout.max_context_tokens=1024
    rollout.concurrency=128 rollout.num_workers=8 'logger=[jsonl,console]' checkpoint.every=0 checkpoint.hf=false
    rollout=sglang "${serving[@]}" rollout.sglang.max_running_requests=128)
together=(rollout.sync=ipc rollout.sglang.colocated=true)
apart=(rollout.sync=nccl "${command[@]}")
if $dry; then
    common+=(trainer=torch trainer.device=cpu trainer.num_threads=1 model=tiny "model.path=$tiny" algorithm.filter=none
        tasks_per_iteration=3 group_size=2 rollout.max_new_tokens=12 rollout.num_workers=1 rollout.concurrency=6
        rollout.sglang.max_running_requests=6)
else
    common+=(trainer=megatron trainer.compile=false trainer.max_tokens_per_gpu=16384 trainer.logprob_chunk_tokens=1024
        rollout.sglang.mem_fraction_static=0.5
        'rollout.sglang.extra_args=[--max-total-tokens,"262144",--cuda-graph-bs-decode,"8","32","64","128",--sleep-on-idle]')
    together+=(trainer.num_gpus=2 rollout.sglang.num_servers=2)
    apart+=(trainer.num_gpus=1 rollout.sglang.num_servers=1)
fi
read -ra pairs <<< "${RL360_PAIRS:-}"
all=$(nproc --all) cores=0-$(($(nproc --all) - 1))
on_pair() {
    [ ${#pairs[@]} -lt 2 ] && return
    cores=$(($1 * all / 2))-$((($1 + 1) * all / 2 - 1))
    program=(env "CUDA_VISIBLE_DEVICES=${pairs[$1]}" python3 -m rl360.cli run)
}
between() { [ ${#pairs[@]} -ge 2 ] || finish; }
# loop NAME [key=value ...]: when it is among those asked for.
loop() {
    case " $loops " in
        *" $1 "*) begin "$1" "$cores" "${common[@]}" "${@:2}" ;;
    esac
}
sample_gpus "$out/gpus.csv"
# The pair that the prediction needs comes first, in case that the time ends.
on_pair 0
loop onpolicy "${apart[@]}" rollout.max_staleness=0
between
on_pair 1
loop ahead "${apart[@]}" "rollout.max_staleness=$staleness"
finish
on_pair 0
loop colocated "${together[@]}" rollout.max_staleness=0
finish
names=(colocated onpolicy ahead)
recounts "${names[@]}"
pack "$out/separate.tgz" "${names[@]}"
python3 benchmarks/loops.py --out "$out/separate" --predict "$work/onpolicy" "$work/ahead" \
    "$work/colocated" "$work/onpolicy" "$work/ahead"
