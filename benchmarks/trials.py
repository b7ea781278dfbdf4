"""Trials per second with a stub model: what Harbor and the sandboxes cost when the model costs nothing.

    python benchmarks/trials.py --trials 200 --workers 2 --concurrency 4

One small HTTP server answers every request with the same code block at once. Each trial is the real thing: a Harbor
trial with the single-turn agent, a sandbox of its own (namespaces, overlay, control groups, no network, seccomp), the
task's test script. Prints trials/s, p50 and p95 of one trial, CPU per trial and the latency of one trial alone. CPU is
of the workers, their keepers and everything in the sandboxes; "machine" is all of /proc/stat, other programs included.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ANSWER = "```python\ndef double(x):\n    return 2 * x\n```"
TEST_SH = """#!/bin/bash
if timeout 10 python3 -S /tests/check.py; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""
CHECK_PY = """import sys
sys.path.insert(0, "/app")
from solution import double
assert double(3) == 6 and double(-4) == -8
"""
LEAST_TRIALS_PER_S = 15.0  # the bars of the project, for 2 idle cores
MOST_ALONE_S = 0.150


def write_task(folder: Path) -> None:
    files = {
        "instruction.md": "Write a Python function `double(x)`.\n",
        "task.toml": 'version = "1.0"\n[agent]\ntimeout_sec = 60.0\n[verifier]\ntimeout_sec = 60.0\n',
        "environment/Dockerfile": "FROM python:3.12-slim\nWORKDIR /app\n",
        "tests/test.sh": TEST_SH,
        "tests/check.py": CHECK_PY,
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def serve(port_to: Connection) -> None:
    """The stub model, in a process of its own."""
    from aiohttp import web

    body = json.dumps(
        {
            "choices": [{"message": {"role": "assistant", "content": ANSWER}, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 20, "completion_tokens": 20},
        }
    )

    async def answer(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(text=body, content_type="application/json")

    async def main() -> None:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", answer)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port_to.send(runner.addresses[0][1])
        await asyncio.Event().wait()

    asyncio.run(main())


def work(rank: int, options: dict[str, Any], url: str, channel: Connection) -> None:
    """A worker process: answers (first, count) with the trials' seconds and its CPU seconds."""
    from rl360.config.schemas import AgentConfig, SandboxConfig
    from rl360.rollout.trial_worker import TrialWorker
    from rl360.types import AttemptSpec, Sampling, Task

    async def main() -> None:
        sandbox = {**vars(SandboxConfig()), "unprivileged": options["unprivileged"]}
        worker = TrialWorker(
            rank=rank, agent=vars(AgentConfig()), sandbox=sandbox,
            cache_dir=options["cache"], trials_dir=options["trials_dir"], trial_timeout_s=120, model_name="stub",
            max_concurrent=options["concurrency"], start_interval_s=options["start_interval_s"], run_id="benchmark",
        )  # fmt: skip
        await worker.start()
        task = Task("double", Path(options["task"]), ("arithmetic",), "")
        loop = asyncio.get_running_loop()
        channel.send("ready")
        while (request := await loop.run_in_executor(None, channel.recv)) is not None:
            first, count = request
            specs = [AttemptSpec(f"b{rank}-{first + i}", "g", 0, task, Sampling(), 0) for i in range(count)]
            cpu = cpu_seconds()
            results = await asyncio.gather(*(worker.run(spec, url) for spec in specs))
            for result in results:
                if not result.rewards or result.rewards["reward"] != 1.0:
                    raise RuntimeError(f"a trial failed: {result}")
            seconds = [r.timings.total_s - r.timings.queue_s for r in results]
            phases = [(r.timings.sandbox_s, r.timings.agent_s, r.timings.verify_s) for r in results]
            channel.send((seconds, phases, cpu_seconds() - cpu))
        await worker.close()

    asyncio.run(main())


def cpu_seconds() -> float:
    """CPU of this process and of its children, running ones and their reaped children included."""
    import psutil

    own = psutil.Process()
    total = 0.0
    for process in [own, *own.children()]:
        times = process.cpu_times()
        total += times.user + times.system
        if process.pid != own.pid:
            total += times.children_user + times.children_system
    return total


def machine_busy_s() -> float:
    fields = [int(x) for x in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    return (sum(fields[:8]) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--concurrency", type=int, default=4, help="trials open at once in each worker")
    parser.add_argument("--start-interval-s", type=float, default=0.0)
    parser.add_argument("--alone", type=int, default=20, help="trials run one after the other, for the latency")
    parser.add_argument("--unprivileged", action="store_true")
    parser.add_argument("--cache", default=str(Path(tempfile.gettempdir()) / "rl360-bench-cache"))
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="rl360-bench-") as folder:
        write_task(Path(folder) / "task")
        receive, send = context.Pipe(duplex=False)
        server = context.Process(target=serve, args=(send,), daemon=True)
        server.start()
        url = f"http://127.0.0.1:{receive.recv()}/v1"
        options = {
            "cache": arguments.cache, "trials_dir": f"{folder}/trials", "task": f"{folder}/task",
            "concurrency": arguments.concurrency, "start_interval_s": arguments.start_interval_s,
            "unprivileged": arguments.unprivileged,
        }  # fmt: skip
        for count in arguments.workers:
            run(context, count, options, url, arguments.trials, arguments.alone)
        server.terminate()
        server.join()


def run(context: Any, workers: int, options: dict[str, Any], url: str, trials: int, alone: int) -> None:
    channels, processes = [], []
    for rank in range(workers):
        ours, theirs = context.Pipe()
        process = context.Process(target=work, args=(rank, options, url, theirs))
        process.start()
        channels.append(ours)
        processes.append(process)
    for channel in channels:
        channel.recv()
    for channel in channels:  # the layer and the first connection
        channel.send((0, 2))
        channel.recv()
    single = []
    for i in range(alone):
        channels[0].send((1000 + i, 1))
        single += channels[0].recv()[0]
    began, busy = time.monotonic(), machine_busy_s()
    share = trials // workers
    for channel in channels:
        channel.send((10_000, share))
    answers = [channel.recv() for channel in channels]
    wall, busy = time.monotonic() - began, machine_busy_s() - busy
    seconds = sorted(s for answer in answers for s in answer[0])
    phases = [p for answer in answers for p in answer[1]]
    done = len(seconds)
    for channel, process in zip(channels, processes, strict=True):
        channel.send(None)
        process.join()
    names = ("sandbox", "agent", "verify")
    medians = ", ".join(f"{n} {1000 * statistics.median(p[i] for p in phases):.0f}" for i, n in enumerate(names))
    alone_p50 = statistics.median(single)
    verdicts = ["ok" if done / wall >= LEAST_TRIALS_PER_S else "BELOW", "ok" if alone_p50 <= MOST_ALONE_S else "ABOVE"]
    print(
        f"workers {workers} x {options['concurrency']} open: {done / wall:.1f} trials/s "
        f"(bar {LEAST_TRIALS_PER_S}: {verdicts[0]}); one trial p50 {1000 * statistics.median(seconds):.0f} ms, "
        f"p95 {1000 * seconds[int(0.95 * (done - 1))]:.0f} ms "
        f"({medians}); alone p50 {1000 * alone_p50:.0f} ms (bar {1000 * MOST_ALONE_S:.0f}: {verdicts[1]}); "
        f"CPU {1000 * sum(a[2] for a in answers) / done:.0f} ms a trial, machine {1000 * busy / done:.0f} ms; "
        f"load {os.getloadavg()[0]:.1f} on {len(os.sched_getaffinity(0))} cores",
        flush=True,
    )


if __name__ == "__main__":
    main()
