"""What the session proxy costs: many long sessions at once in front of an engine that keeps a fixed pace.

    python benchmarks/sessions.py --sessions 200 --history 100 --turns 3

The engine is a stub in processes of its own: each request takes its tokens at 50 a second, however many are open. The
proxy is the real one, in its own process; so are the agents and the health probe. Every session first talks until it
has its history, without pacing; then the measured turns begin. Prints the bars of the project and what was measured:

- health: /health as another process sees it, p50, p99 and the slowest;
- CPU of the proxy for one turn, and what of it the tokenizer takes (the same texts, timed apart, one thread) and what
  this benchmark's own health probe does;
- tokens/s through the proxy, against the same requests sent to the engine directly.

Loopback only. Ends by itself after --max-s.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import tempfile
import time
import urllib.request
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from stub_engine import stub_reply

TOKENS_PER_S = 50.0  # of one session
IDLE_S = 2.0
HEALTH_P99_S = 1.0  # the bars of the project
CPU_PER_TURN_S = 0.005
LEAST_THROUGHPUT = 0.95
OBSERVATION = "exit=0\n" + "drwxr-xr-x 2 agent agent 4096 src/module_{n}.py  def function_{n}(x): return x + {n}\n" * 5
PROSE = (
    "Let me look at the failing test first. The traceback says that `parse` returns None when the line is empty, so "
    "the caller should skip it.\n```bash\nsed -n '1,40p' src/parser.py && python -m pytest -x tests\n```\n"
)
TASK = "There is a small repository in /app. Its tests fail. Find out why, repair it, and say when you are done. "


# ---- the engine


def run_engine(channel: Connection, pool: list[int], eos: int) -> None:
    """/generate with SGLang's fields. Reads of the request what it needs with two searches: it is not what is timed."""
    from aiohttp import web

    paced = {"on": False}

    async def generate(request: web.Request) -> web.Response:
        reply, count = stub_reply(await request.read(), pool, eos)
        if paced["on"]:
            await asyncio.sleep(count / TOKENS_PER_S)
        return web.json_response(reply)

    async def pace(request: web.Request) -> web.Response:
        paced["on"] = (await request.read()) == b"on"
        return web.Response()

    async def main() -> None:
        app = web.Application(client_max_size=2**28)
        app.router.add_post("/generate", generate)
        app.router.add_post("/pace", pace)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
        channel.send(f"http://127.0.0.1:{runner.addresses[0][1]}")
        await asyncio.Event().wait()

    asyncio.run(main())


# ---- the agents


class Talk:
    """One session's agent. Its request is kept as bytes and appended to, so that agents cost little here."""

    def __init__(self, url: str, number: int) -> None:
        self.url, self.number, self.turns = f"{url}/chat/completions", number, 0
        self._messages = json.dumps({"role": "user", "content": TASK + str(number)})

    def body(self) -> bytes:
        return f'{{"model": "policy", "messages": [{self._messages}]}}'.encode()

    def add(self, message: dict[str, Any]) -> None:
        self.turns += 1
        observation = {"role": "user", "content": OBSERVATION.replace("{n}", str(1000 * self.number + self.turns))}
        self._messages += f", {json.dumps(message)}, {json.dumps(observation)}"


def run_agents(channel: Connection, tokens: int) -> None:
    """Answers ("talk", urls), ("turns", n, paced) and ("direct", urls, ids, n) with tokens/s, summed over sessions.

    Paced sessions start at any time within one turn of each other, as agents in the middle of their work do.
    """
    import aiohttp

    talks: list[Talk] = []
    turn_s = tokens / TOKENS_PER_S

    async def turns(client: aiohttp.ClientSession, count: int, paced: bool) -> float:
        async def one(talk: Talk) -> float:
            await asyncio.sleep(random.random() * turn_s if paced else 0.0)
            began, sampled = time.monotonic(), 0
            for _ in range(count):
                async with client.post(talk.url, data=talk.body()) as response:
                    reply = json.loads(await response.read())
                    if response.status != 200:
                        raise RuntimeError(f"{talk.url}: {response.status}: {reply}")
                sampled += reply["usage"]["completion_tokens"]
                talk.add(reply["choices"][0]["message"])
            return sampled / (time.monotonic() - began)

        return sum(await asyncio.gather(*(one(talk) for talk in talks)))

    async def direct(client: aiohttp.ClientSession, urls: list[str], ids: list[int], count: int) -> float:
        params = {"max_new_tokens": tokens}
        body = json.dumps({"rid": "x", "sampling_params": params, "return_logprob": True, "input_ids": ids}).encode()

        async def one(url: str) -> float:
            await asyncio.sleep(random.random() * turn_s)
            began, sampled = time.monotonic(), 0
            for _ in range(count):
                async with client.post(f"{url}/generate", data=body) as response:
                    sampled += len(json.loads(await response.read())["output_ids"])
            return sampled / (time.monotonic() - began)

        return sum(await asyncio.gather(*(one(url) for url in urls)))

    async def main() -> None:
        loop = asyncio.get_running_loop()
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=600)) as client:
            while (request := await loop.run_in_executor(None, channel.recv)) is not None:
                rate = 0.0
                if request[0] == "talk":
                    talks.extend(Talk(url, number) for number, url in enumerate(request[1]))
                elif request[0] == "turns":
                    rate = await turns(client, *request[1:])
                else:
                    rate = await direct(client, *request[1:])
                channel.send(rate)

    asyncio.run(main())


def run_probe(channel: Connection, url: str) -> None:
    """Asks /health every 20 ms from a first message to the next; answers with the seconds that each took. Twice."""
    for _ in range(2):
        waits: list[float] = []
        channel.recv()
        while not channel.poll(0.02):
            began = time.monotonic()
            with urllib.request.urlopen(f"{url}/health", timeout=60) as response:
                response.read()
            waits.append(time.monotonic() - began)
        channel.recv()
        channel.send(waits)


# ---- the benchmark


def measure(arguments: argparse.Namespace) -> None:
    import psutil

    from rl360.engine.workers import LocalWorkerGroup
    from rl360.gateway.direct import DirectGateway
    from rl360.gateway.tokenizer import TextTokenizer
    from rl360.types import AttemptSpec, Sampling, Task

    context = multiprocessing.get_context("spawn")
    processes: list[Any] = []

    def start(target: Any, *args: Any) -> Connection:
        ours, theirs = context.Pipe()
        process = context.Process(target=target, args=(theirs, *args), daemon=True)
        process.start()
        processes.append(process)
        return ours

    tokenizer = TextTokenizer.from_folder(arguments.tokenizer)
    pool = tokenizer.encode(PROSE * 40)
    eos = min(tokenizer.eos_ids)
    engines = [start(run_engine, pool, eos) for _ in range(arguments.engines)]
    urls = [engine.recv() for engine in engines]
    agents = [start(run_agents, arguments.tokens) for _ in range(arguments.agents)]
    deadline = time.monotonic() + arguments.max_s

    def ask(requests: list[tuple[Any, ...]]) -> float:
        for agent, request in zip(agents, requests, strict=True):
            agent.send(request)
        rate = 0.0
        for agent in agents:
            if not agent.poll(max(0.0, deadline - time.monotonic())):
                raise SystemExit(f"not done after {arguments.max_s} s")
            rate += agent.recv()
        return rate

    def pace(on: bool) -> None:
        for url in urls:
            request = urllib.request.Request(f"{url}/pace", data=b"on" if on else b"off", method="POST")
            urllib.request.urlopen(request, timeout=10).close()

    async def drive(folder: Path) -> None:
        def workers(target: str, size: int, kwargs: Any, name: str) -> LocalWorkerGroup:
            env = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
            return LocalWorkerGroup(target, size, kwargs, name=name, log_dir=folder, env=env)

        gateway = DirectGateway(
            engine_urls=urls, tokenizer_dir=arguments.tokenizer, worker_group_factory=workers, log_dir=folder,
            request_timeout_s=600,
        )  # fmt: skip
        await gateway.start()
        try:
            task = Task("bench", Path("bench"), (), "")
            sampling = Sampling(max_new_tokens=arguments.tokens, max_context_tokens=10**7, max_turns=10**6)
            specs = [AttemptSpec(f"b{i}", "g", 0, task, sampling, i) for i in range(arguments.sessions)]
            bases = [await gateway.open(spec) for spec in specs]
            shares = [bases[i :: len(agents)] for i in range(len(agents))]
            proxy = psutil.Process(gateway._group.pid(0))  # type: ignore[attr-defined]
            probe = start(run_probe, bases[0].split("/s/")[0])

            await asyncio.to_thread(ask, [("talk", share) for share in shares])
            began, cpu = time.monotonic(), _cpu_s(proxy)
            await asyncio.to_thread(ask, [("turns", arguments.history, False)] * len(agents))
            grown = arguments.history * arguments.sessions
            grow_s, grow_cpu = time.monotonic() - began, _cpu_s(proxy) - cpu
            print(
                f"{arguments.sessions} sessions grown to {arguments.history} turns in {grow_s:.0f} s, unpaced: "
                f"{grown / grow_s:.0f} turns/s, {1000 * grow_cpu / grown:.2f} ms of proxy CPU a turn",
                flush=True,
            )

            cpu = _cpu_s(proxy)  # what being asked for its health costs it, with nothing else to do
            probe.send("start")
            await asyncio.sleep(IDLE_S)
            probe.send("stop")
            health_s = (_cpu_s(proxy) - cpu) / len(probe.recv())

            pace(True)
            probe.send("start")
            began, cpu = time.monotonic(), _cpu_s(proxy)
            through = await asyncio.to_thread(ask, [("turns", arguments.turns, True)] * len(agents))
            seconds, cpu = time.monotonic() - began, _cpu_s(proxy) - cpu
            probe.send("stop")
            waits = sorted(probe.recv())

            sessions = await asyncio.gather(*(gateway.close_session(spec.try_id) for spec in specs))
            forks = sum(len(session.segments) - 1 for session in sessions)
            prompts = sessions[0].segments[0].token_ids_T.tolist()
            engine_urls = [[urls[i % len(urls)] for i in range(len(share))] for share in shares]
            alone = await asyncio.to_thread(
                ask, [("direct", chosen, prompts, arguments.turns) for chosen in engine_urls]
            )
        finally:
            await gateway.close()

        turns = arguments.sessions * arguments.turns
        text_s = _tokenizer_s(tokenizer, pool, eos, arguments.tokens)
        enough = "ok" if through >= LEAST_THROUGHPUT * alone else "BELOW"
        p99 = waits[int(0.99 * (len(waits) - 1))]
        probes_s = health_s * len(waits) / turns
        rest_s = cpu / turns - text_s - probes_s
        print(
            f"history {len(prompts)} tokens, {arguments.tokens} tokens a turn, {turns} turns in {seconds:.1f} s, "
            f"forks {forks}; load {os.getloadavg()[0]:.1f} on {len(os.sched_getaffinity(0))} cores\n"
            f"health: p50 {1000 * waits[len(waits) // 2]:.1f} ms, p99 {1000 * p99:.0f} ms, "
            f"slowest {1000 * waits[-1]:.0f} ms of {len(waits)} "
            f"(bar {HEALTH_P99_S:g} s: {'ok' if p99 < HEALTH_P99_S else 'ABOVE'})\n"
            f"proxy CPU a turn: {1000 * cpu / turns:.2f} ms, of it tokenizer {1000 * text_s:.2f} ms, "
            f"the health probe {1000 * probes_s:.2f} ms, "
            f"rest {1000 * rest_s:.2f} ms (bar {1000 * CPU_PER_TURN_S:g} ms: "
            f"{'ok' if rest_s <= CPU_PER_TURN_S else 'ABOVE'})\n"
            f"throughput: {through:.0f} tokens/s through the proxy, {alone:.0f} from the engine alone: "
            f"{through / alone:.3f} (bar {LEAST_THROUGHPUT:g}: {enough})",
            flush=True,
        )

    try:
        with tempfile.TemporaryDirectory(prefix="rl360-sessions-") as folder:
            asyncio.run(drive(Path(folder)))
    finally:
        for process in processes:
            process.terminate()
            process.join()


def _cpu_s(process: Any) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _tokenizer_s(tokenizer: Any, pool: list[int], eos: int, tokens: int, repeat: int = 50) -> float:
    """CPU seconds of the tokenizer for one turn: decode what was sampled, encode what is new."""
    ids = [*pool[: tokens - 1], eos]
    tail = f"\n<|im_start|>user\n{OBSERVATION.replace('{n}', '100001')}<|im_end|>\n<|im_start|>assistant\n"
    began = time.process_time()
    for _ in range(repeat):
        tokenizer.decode_turn(ids)
        tokenizer.encode_after(tail, eos)
    return (time.process_time() - began) / repeat


def main() -> None:
    from rl360.models.fetch import default_models_dir

    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--sessions", type=int, default=200)
    parser.add_argument("--history", type=int, default=100, help="turns of each session before the measured ones")
    parser.add_argument("--turns", type=int, default=3, help="measured turns of each session")
    parser.add_argument("--tokens", type=int, default=150, help="sampled tokens a turn")
    parser.add_argument("--engines", type=int, default=2, help="stub engine processes")
    parser.add_argument("--agents", type=int, default=2, help="processes that play the agents")
    parser.add_argument("--max-s", type=float, default=900.0)
    parser.add_argument("--tokenizer", type=Path, default=default_models_dir() / "smollm2_135m")
    measure(parser.parse_args())


if __name__ == "__main__":
    main()
