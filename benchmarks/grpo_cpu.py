"""GRPO on a CPU: RL360 against TRL's GRPOTrainer, same model, tasks, samples, length cap and threads, in one run.

    .venv/bin/python benchmarks/grpo_cpu.py [--steps 3] [--group-size 4] [--rounds 1]

TRL runs in its own environment (benchmarks/requirements-trl.txt in .venv-trl, made when absent). RL360 runs four
times, each adding one saving, so that each can be told apart:

    like for like     stops only at the end-of-sequence token, no group skipped, prompts computed for each member +
    shared prompts  a prompt's compute shared by its group in training (its prefill is shared by the engine in all
    four) + code block stop the turn ends when the code block closes as used           and groups without differing
    rewards are not trained on

Prints samples/s and CPU seconds a sample of each, and the ratio to TRL. RL360's step includes what TRL's does not:
real sandboxes, the HTTP session proxy, the ledger and the trajectories. TRL's reward runs each solution in a bare
subprocess.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TASKS = ("arithmetic-square", "arithmetic-add_three", "arithmetic-average", "arithmetic-rectangle_area")
MICRO_BATCH = 8  # TRL's samples in one forward; 16 at once need more memory and were no faster
VARIANTS = {
    "like for like": ["algorithm.filter=none", "rollout.stop_at_code_block=false", "trainer.share_prompts=false"],
    "+ shared prompts": ["algorithm.filter=none", "rollout.stop_at_code_block=false"],
    "+ code block stop": ["algorithm.filter=none"],
    "as used": [],
}


@dataclass(frozen=True)
class Figure:
    samples_per_s: float
    cpu_s_per_sample: float
    response_tokens: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3, help="counted steps of each run; one more is the warm-up")
    parser.add_argument("--group-size", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=1, help="times that both sides take turns")
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "smollm2_135m")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    args = parser.parse_args()
    found: dict[str, list[Figure]] = {"TRL": [], **{name: [] for name in VARIANTS}}
    with tempfile.TemporaryDirectory(prefix="rl360-bench-") as scratch:
        for number in range(args.rounds):
            print(f"round {number + 1} of {args.rounds}", file=sys.stderr)
            found["TRL"].append(run_trl(args, Path(scratch)))
            for name, overrides in VARIANTS.items():
                out = Path(scratch) / f"{number}-{name.replace(' ', '-')}"
                found[name].append(run_rl360(args, overrides, out))
    report(found, args)


def run_trl(args: argparse.Namespace, scratch: Path) -> Figure:
    python = trl_python()
    pool = ROOT / "rl360" / "tasks" / "bundled" / "small_coding"
    tasks = [{"prompt": (pool / t / "instruction.md").read_text(), "tests": trl_tests(pool / t)} for t in TASKS]
    spec = {
        "model": str(args.model),
        "tasks": tasks,
        "num_threads": args.threads,
        "group_size": args.group_size,
        "micro_batch": MICRO_BATCH,
        "max_new_tokens": args.max_new_tokens,
        "temperature": 1.0,
        "learning_rate": 2e-5,
        "steps": args.steps + 1,
        "seed": 0,
    }
    spec_file = scratch / "trl.json"
    spec_file.write_text(json.dumps(spec))
    env = {**os.environ, "OMP_NUM_THREADS": str(args.threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [str(python), str(ROOT / "benchmarks" / "trl_side.py"), str(spec_file)],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        sys.exit(f"TRL failed:\n{done.stderr[-3000:]}")
    answer = json.loads(done.stdout.strip().splitlines()[-1])
    steps = answer["steps"][1:]
    samples = len(TASKS) * args.group_size
    return Figure(
        samples / statistics.median(s["wall_s"] for s in steps),
        statistics.median(s["cpu_s"] for s in steps) / samples,
        answer["response_tokens_mean"],
    )


def trl_tests(task: Path) -> list[str]:
    """The cases of a bundled task as assertions."""
    cases: dict = {}
    exec((task / "tests" / "cases.py").read_text(), cases)
    return [f"assert {cases['FUNCTION']}(*{arguments!r}) == {expected!r}" for arguments, expected in cases["CASES"]]


def trl_python() -> Path:
    folder = ROOT / ".venv-trl"
    python = folder / "bin" / "python"
    if not python.exists():
        uv = ROOT / ".venv" / "bin" / "uv"
        subprocess.run([str(uv), "venv", "-q", "--python", sys.executable, str(folder)], check=True)
        requirements = ROOT / "benchmarks" / "requirements-trl.txt"
        subprocess.run([str(uv), "pip", "install", "-q", "--python", str(python), "-r", str(requirements)], check=True)
    return python


def run_rl360(args: argparse.Namespace, overrides: list[str], out: Path) -> Figure:
    command = [
        str(ROOT / ".venv" / "bin" / "rl360"),
        "run",
        "experiment=quickstart",
        "evaluation=none",
        f"tasks.include=[{','.join(TASKS)}]",
        "tasks.path=${rl360_bundled:small_coding}",
        f"model.path={args.model}",
        f"iterations={args.steps + 1}",
        f"group_size={args.group_size}",
        f"rollout.max_new_tokens={args.max_new_tokens}",
        f"trainer.num_threads={args.threads}",
        "checkpoint.every=0",
        "checkpoint.hf=false",
        f"output_dir={out}",
        *overrides,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}\n{done.stdout[-1500:]}\n{done.stderr[-3000:]}")
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()][1:]
    samples = len(TASKS) * args.group_size
    return Figure(
        samples / statistics.median(r["time/step_s"] for r in rows),
        statistics.median(r["time/cpu_s"] for r in rows) / samples,
        statistics.mean(r["rollout/response_tokens_mean"] for r in rows),
    )


def report(found: dict[str, list[Figure]], args: argparse.Namespace) -> None:
    """Medians over rounds; ratios are to TRL of the same round."""
    print(f"{len(TASKS)} tasks x {args.group_size}, {args.max_new_tokens} new tokens at most, {args.threads} threads")
    print(
        f"{'':<20}{'samples/s':>10}{'CPU s/sample':>14}{'x TRL':>8}{'CPU x TRL':>11}{'tokens':>8}{'tokens/s x TRL':>16}"
    )
    for name, figures in found.items():
        speed = statistics.median(f.samples_per_s / t.samples_per_s for f, t in zip(figures, found["TRL"], strict=True))
        cost = statistics.median(
            t.cpu_s_per_sample / f.cpu_s_per_sample for f, t in zip(figures, found["TRL"], strict=True)
        )
        tokens = statistics.median(
            f.samples_per_s * f.response_tokens / (t.samples_per_s * t.response_tokens)
            for f, t in zip(figures, found["TRL"], strict=True)
        )
        print(
            f"{name:<20}{statistics.median(f.samples_per_s for f in figures):>10.3f}"
            f"{statistics.median(f.cpu_s_per_sample for f in figures):>14.2f}{speed:>8.2f}{cost:>11.2f}"
            f"{statistics.mean(f.response_tokens for f in figures):>8.1f}{tokens:>16.2f}"
        )
    if args.json:
        args.json.write_text(json.dumps({n: [vars(f) for f in fs] for n, fs in found.items()}, indent=2) + "\n")


if __name__ == "__main__":
    main()
