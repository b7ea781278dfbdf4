"""TRL's GRPOTrainer on the tasks of benchmarks/grpo_cpu.py; runs in TRL's own virtual environment and imports no RL360.

In: a JSON file with the model folder, prompts and tests, and the numbers that both sides share. Out: one JSON line
with the seconds and CPU seconds of each step after the warm-up. Rewards run each solution with its tests in a Python
subprocess.
"""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
import tempfile
import time

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

TEST_TIMEOUT_S = 5.0


def cpu_seconds() -> float:
    """User and system seconds of this process and of its finished children."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in usages)


def passes(completion: str, tests: list[str]) -> float:
    match = re.search(r"```[^\n]*\n(.*?)```", completion, re.DOTALL)
    if match is None:
        return 0.0
    program = match.group(1) + "\n" + "\n".join(tests)
    try:
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=TEST_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return 0.0
    return float(done.returncode == 0)


class StepClock(TrainerCallback):
    """Notes wall and CPU seconds at the end of every optimizer step."""

    def __init__(self) -> None:
        self.marks: list[tuple[float, float]] = []

    def on_step_begin(self, args, state, control, **kwargs):
        if not self.marks:
            self.marks.append((time.perf_counter(), cpu_seconds()))

    def on_step_end(self, args, state, control, **kwargs):
        self.marks.append((time.perf_counter(), cpu_seconds()))


def main() -> None:
    with open(sys.argv[1]) as file:
        spec = json.load(file)
    torch.set_num_threads(spec["num_threads"])
    tokenizer = AutoTokenizer.from_pretrained(spec["model"])
    model = AutoModelForCausalLM.from_pretrained(spec["model"], dtype=torch.float32)
    rows = [{"prompt": [{"role": "user", "content": t["prompt"]}], "tests": t["tests"]} for t in spec["tasks"]]
    clock = StepClock()
    lengths: list[int] = []

    def reward(completions, tests, completion_ids, **_):
        lengths.extend(len(ids) for ids in completion_ids)
        return [passes(c[0]["content"], t) for c, t in zip(completions, tests, strict=True)]

    with tempfile.TemporaryDirectory() as out:
        config = GRPOConfig(
            output_dir=out,
            per_device_train_batch_size=spec["micro_batch"],
            gradient_accumulation_steps=len(rows) * spec["group_size"] // spec["micro_batch"],
            num_generations=spec["group_size"],
            generation_batch_size=len(rows) * spec["group_size"],
            max_completion_length=spec["max_new_tokens"],
            temperature=spec["temperature"],
            learning_rate=spec["learning_rate"],
            lr_scheduler_type="constant",
            adam_beta1=0.9,
            adam_beta2=0.98,
            weight_decay=0.1,
            beta=0.0,
            scale_rewards="none",
            loss_type="dapo",
            epsilon_high=0.28,
            max_steps=spec["steps"],
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            save_strategy="no",
            report_to=[],
            logging_steps=1,
            shuffle_dataset=False,
            seed=spec["seed"],
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=config,
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            callbacks=[clock],
        )
        trainer.train()
    steps = [{"wall_s": b[0] - a[0], "cpu_s": b[1] - a[1]} for a, b in zip(clock.marks, clock.marks[1:], strict=False)]
    counted = lengths[len(rows) * spec["group_size"] :]  # without the warm-up step
    mean_tokens = sum(counted) / max(len(counted), 1)
    print(json.dumps({"steps": steps, "samples": len(counted), "response_tokens_mean": mean_tokens}), flush=True)


if __name__ == "__main__":
    main()
