"""A run of servers on the trainer's own GPUs, with what each phase of an iteration took: seconds and GPU memory.

    python benchmarks/colocated.py --out FILE.json key=value ... output_dir=FOLDER

In: the arguments of `rl360 run`. Out: a JSON with the phases (a list of seconds and the peak of what `nvidia-smi` said
is used of the fullest GPU), each iteration's numbers, how the run ended, what `rl360 check` says of it and what its
logs say of memory; the exit code is the run's. A run that the check refuses is made all the same, since what becomes
of it may be the question; not one that the disk is too small for (checkpoint.at_end=false needs none for weights).

A phase is a call that is watched from outside; what is in none is the rollout. Calls contain others: an instant counts
for the innermost.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROLLOUT = "rollout"
SAMPLE_MS = 50
SHOWN = (
    "time/step_s", "time/wait_s", "time/train_s", "time/publish_s", "time/sync_stall_s", "time/sync_transfer_s",
    "mismatch/kl", "mismatch/logprob_diff_mean", "train/grad_norm", "rollout/samples_trained", "rollout/samples_masked",
    "perf/peak_memory_gib_max", "perf/peak_reserved_gib_max", "perf/train_tokens_per_s",
)  # fmt: skip
OUT_OF_MEMORY = ("out of memory", "OutOfMemory", "leave no GPU memory")


@dataclass(frozen=True, slots=True)
class Span:
    name: str
    began_s: float
    ended_s: float


@dataclass(slots=True)
class Watch:
    """Spans of watched calls, and samples (seconds, MiB of the fullest GPU), both on the monotonic clock."""

    spans: list[Span] = field(default_factory=list)
    samples: list[tuple[float, float]] = field(default_factory=list)

    def call(self, owner: type, method: str, name: str) -> None:
        """Watch every call of a method, plain or async."""
        original = getattr(owner, method)

        def plain(*args: Any, **kwargs: Any) -> Any:
            began = time.monotonic()
            try:
                return original(*args, **kwargs)
            finally:
                self.spans.append(Span(name, began, time.monotonic()))

        async def awaited(*args: Any, **kwargs: Any) -> Any:
            began = time.monotonic()
            try:
                return await original(*args, **kwargs)
            finally:
                self.spans.append(Span(name, began, time.monotonic()))

        setattr(owner, method, awaited if inspect.iscoroutinefunction(original) else plain)

    def sample(self, command: Sequence[str]) -> subprocess.Popen[str]:
        """Read the memory that `command` prints, a line for each GPU of each sample; the caller ends it."""
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

        def read() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                if line.strip().isdigit():
                    self.samples.append((time.monotonic(), float(line)))

        threading.Thread(target=read, daemon=True).start()
        return process

    def phase_at(self, now_s: float) -> str:
        """The innermost span at that moment; between the first and the last one, the rollout."""
        inside = [span for span in self.spans if span.began_s <= now_s <= span.ended_s]
        return max(inside, key=lambda span: span.began_s).name if inside else ROLLOUT

    def peaks_gib(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for now_s, mib in self.samples:
            phase = self.phase_at(now_s)
            found[phase] = max(found.get(phase, 0.0), mib / 1024)
        return found

    def seconds(self) -> dict[str, list[float]]:
        found: dict[str, list[float]] = {}
        for span in sorted(self.spans, key=lambda span: span.began_s):
            found.setdefault(span.name, []).append(span.ended_s - span.began_s)
        return found


def watch_phases(watch: Watch) -> None:
    from rl360.serving.fleet import Fleet
    from rl360.trainers.megatron.trainer import MegatronTrainer
    from rl360.weight_sync.colocated import ColocatedSync
    from rl360.weight_sync.transports import HandleTransport

    for method in ("start", "step", "onload", "offload"):
        watch.call(MegatronTrainer, method, f"trainer {method}")
    watch.call(Fleet, "start", "servers start")
    watch.call(ColocatedSync, "_release", "engines release")
    watch.call(ColocatedSync, "_return_memory", "engines return")
    watch.call(HandleTransport, "send", "transfer")


def run(overrides: Sequence[str]) -> tuple[str, Path, Sequence[str]]:
    """(how it ended, the run folder, what the check says of it). Raises ConfigError for arguments that do not fit each
    other, and where the disk is too small."""
    from omegaconf import OmegaConf

    from rl360.config.check import examine, load
    from rl360.config.compose import Request, compose
    from rl360.config.run_folder import save
    from rl360.engine.run import run_experiment
    from rl360.errors import ConfigError

    composed = compose(Request(tuple(overrides)))
    config, problems = load(composed.values, composed.choices)
    if config is None or composed.problems or config.output_dir is None:
        raise ConfigError([*composed.problems, *problems] or "output_dir: expected the run's folder")
    said = examine(composed).problems
    if no_room := [problem for problem in said if problem.startswith("disk:")]:
        raise ConfigError(no_room)
    folder = Path(config.output_dir).absolute()
    values = {**composed.values, "output_dir": str(folder)}
    save(folder, values, {})
    config.output_dir = str(folder)
    try:
        run_experiment(config, OmegaConf.create(values))
    except Exception as error:  # whatever ends it is the result
        return f"{type(error).__name__}: {error}", folder, said
    return "finished", folder, said


def lines_about_memory(logs: Iterable[Path]) -> list[str]:
    """What the logs say of memory that was not there, each line once."""
    found: dict[str, None] = {}
    for log in logs:
        for line in log.read_text(errors="replace").splitlines():
            if any(words in line for words in OUT_OF_MEMORY):
                found[f"{log.name}: {line.strip()[:400]}"] = None
    return list(found)[:10]


def report(
    watch: Watch, ended: str, folder: Path, overrides: Sequence[str], said: Sequence[str] = ()
) -> dict[str, Any]:
    rows = []
    if (folder / "metrics.jsonl").is_file():
        for line in (folder / "metrics.jsonl").read_text().splitlines():
            row = json.loads(line)
            rows.append({name: row[name] for name in SHOWN if name in row})
    return {
        "overrides": list(overrides),
        "ended": ended,
        "check": list(said),
        "out_of_memory": lines_about_memory(sorted((folder / "logs").glob("*.log"))),
        "peak_gib": watch.peaks_gib(),
        "median_s": {name: statistics.median(values) for name, values in watch.seconds().items()},
        "seconds": watch.seconds(),
        "iterations": rows,
    }


def main(arguments: Sequence[str] | None = None, sampler: Callable[[], Sequence[str] | None] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parsed, overrides = parser.parse_known_args(arguments)
    watch = Watch()
    watch_phases(watch)
    command = (sampler or _nvidia_smi)()
    process = watch.sample(command) if command else None
    try:
        ended, folder, said = run(overrides)
    finally:
        if process is not None:
            process.terminate()
            process.wait()
    found = report(watch, ended, folder, overrides, said)
    parsed.out.write_text(json.dumps(found, indent=1) + "\n")
    for name in ("check", "ended", "out_of_memory", "peak_gib", "median_s"):
        print(f"{name}: {json.dumps(found[name])}")
    return 0 if ended == "finished" else 1


def _nvidia_smi() -> Sequence[str] | None:
    if shutil.which("nvidia-smi") is None:
        return None
    mine = os.environ.get("CUDA_VISIBLE_DEVICES")
    return (
        "nvidia-smi",
        *(("-i", mine) if mine else ()),
        "--query-gpu=memory.used",
        "--format=csv,noheader,nounits",
        "-lms",
        str(SAMPLE_MS),
    )


if __name__ == "__main__":
    sys.exit(main())
