"""How `rl360 view` opens a large run: time of the first page, of others, and the server's memory.

    python benchmarks/viewer.py --gib 2
    python benchmarks/viewer.py --gib 2 --no-index     the same run without its index files

Makes a run folder of that size (attempts of many turns whose text does not compress), starts the server as its own
process and asks for pages over HTTP. Rows are made from one attempt by replacing its ids. The folder is removed again.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from rl360.engine import frames
from rl360.engine.codec import attempt_to_json
from rl360.engine.journal import Trajectories
from rl360.types import (
    Attempt,
    AttemptSpec,
    Sampling,
    Score,
    Segment,
    Stop,
    Task,
    Timings,
    TrialResult,
    Turn,
    VersionSpan,
)

GROUP_SIZE = 16
TAGS = ("coding", "tools", "files")
PLACE = "PLACEHOLDER-ID"


def make_run(folder: Path, *, iterations: int, groups: int, turns: int = 20, turn_bytes: int = 4000) -> int:
    """Write trajectories, indexes and metrics of GROUP_SIZE attempts a group; returns the bytes of the rows."""
    (folder / "trajectories").mkdir(parents=True)
    trajectories = Trajectories(folder)
    generator = random.Random(0)
    templates = [json.dumps(_row(generator, tag, turns, turn_bytes)) for tag in TAGS]
    total = 0
    with open(folder / "metrics.jsonl", "w") as metrics:
        for iteration in range(iterations):
            rows = list(_rows(templates, iteration, groups))
            packed = [frames.pack(row) for row in rows]
            path = trajectories.path(iteration)
            frames.append(path, packed, durable=False)
            lines = trajectories.index(iteration)  # scans what it has no lines of
            trajectories.index_path(iteration).write_text("".join(json.dumps(line) + "\n" for line in lines))
            total += sum(map(len, packed))
            scalars = {"reward/unfiltered_mean": iteration / iterations, "reward/success_rate": iteration / iterations}
            metrics.write(json.dumps({"iteration": iteration, **scalars}) + "\n")
    return total


def _rows(templates: list[str], iteration: int, groups: int) -> Iterator[dict[str, Any]]:
    for number in range(groups * GROUP_SIZE):
        group = number // GROUP_SIZE
        attempt_id = f"t{iteration:05d}-{group:03d}-task-{number % GROUP_SIZE}"
        row = json.loads(templates[group % len(templates)].replace(PLACE, attempt_id))
        row["spec"] |= {"iteration": iteration, "group_id": f"t{iteration:05d}-{group:03d}-task"}
        row["spec"]["task"]["task_id"] = f"task-{group}"
        row |= {"reward": float(number % 2), "success": bool(number % 2)}
        yield row


def _row(generator: random.Random, tag: str, turns: int, turn_bytes: int) -> dict[str, Any]:
    def text() -> str:
        return base64.b85encode(generator.randbytes(turn_bytes * 4 // 5)).decode()

    length = turns * turn_bytes // 4
    ids = np.array([generator.randrange(50_000) for _ in range(length)], dtype=np.int32)
    mask = np.arange(length) % 500 >= 250
    logprobs = np.where(mask, -np.random.default_rng(0).exponential(size=length), 0).astype(np.float32)
    spec = AttemptSpec(
        PLACE, PLACE, 0, Task("task", Path("tasks"), (tag, "big"), "0" * 64), Sampling(max_turns=turns), seed=1
    )
    attempt = Attempt(
        spec=spec,
        segments=(Segment(ids, mask, logprobs, (VersionSpan(0, 250, length),)),),
        turns=tuple(
            Turn(({"role": "user", "content": text()},), {"role": "assistant", "content": text()}, "stop", 9, 9, 0.1, 0)
            for _ in range(turns)
        ),
        scores={"verifier": Score(1.0, 1.0, success=True)},
        stop=Stop.FINISHED,
        cause=None,
        timings=Timings(0.1, 0.2, 3.0, 2.0, 0.4, 3.7),
        trial=TrialResult(PLACE, {"reward": 1.0}, None, None, {}, Timings(), Path("trials") / PLACE),
    )
    return {**attempt_to_json(attempt), "outcome": {"kind": "trained", "reason": None}}


class Server:
    """`rl360 view` as a process of its own."""

    def __init__(self, run_dir: Path) -> None:
        code = "import sys; from rl360.viewer.cli import view; sys.exit(view(sys.argv[1:]))"
        self._began = time.perf_counter()
        command = [sys.executable, "-c", code, str(run_dir)]
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        assert self._process.stdout is not None
        self.url = self._process.stdout.readline().split()[0].rstrip("/")

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.terminate()
        self._process.wait(timeout=20)

    def since_start_s(self) -> float:
        return time.perf_counter() - self._began

    def get(self, address: str) -> tuple[float, str]:
        """Seconds, and the page."""
        began = time.perf_counter()
        with urllib.request.urlopen(self.url + address, timeout=600) as answer:
            text = answer.read().decode()
        return time.perf_counter() - began, text

    def peak_mib(self) -> float:
        """The most memory that the process ever had (VmHWM)."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def measure(run_dir: Path, iterations: int) -> dict[str, float]:
    """Seconds of each page in turn, of the whole start, and the peak memory afterwards."""
    last, middle = iterations - 1, iterations // 2
    attempt = f"/attempt/{middle}/t{middle:05d}-001-task-3.t0"
    with Server(run_dir) as server:
        idle_mib = server.peak_mib()
        found = {"first page": server.get("/")[0], "from the command to the first page": server.since_start_s()}
        found["iteration"] = server.get(f"/iteration/{last}")[0]
        found["iteration, by tag"] = server.get(f"/iteration/{middle}?tag=tools")[0]
        found["attempt"] = server.get(attempt)[0]
        found["attempt again"] = server.get(attempt)[0]
        found["search, nothing found"] = server.get("/attempts?reward_min=9")[0]
        found["peak before the first page, MiB"] = idle_mib
        found["peak, MiB"] = server.peak_mib()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--groups", type=int, default=8, help="of 16 attempts, an iteration")
    parser.add_argument("--no-index", action="store_true", help="remove the index files")
    parser.add_argument("--folder", type=Path, help="where to make it; default: a temporary folder")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as temporary:
        one = make_run(Path(temporary) / "one", iterations=1, groups=arguments.groups)
        iterations = max(4, round(arguments.gib * 2**30 / one))
        run_dir = Path(temporary) / "run"
        total = make_run(run_dir, iterations=iterations, groups=arguments.groups)
        if arguments.no_index:
            for path in (run_dir / "trajectories").glob("*.index.jsonl"):
                path.unlink()
        rows = iterations * arguments.groups * GROUP_SIZE
        print(f"{total / 2**30:.2f} GiB in {iterations} iterations, {rows} attempts of {total / rows / 1024:.0f} KiB")
        for name, value in measure(run_dir, iterations).items():
            print(f"{name:36s} {value:10.3f}" if "MiB" not in name else f"{name:36s} {value:10.0f}")


if __name__ == "__main__":
    main()
