"""What each hop costs: engines alone, SMG, the session proxy, and both, for the same requests.

    python benchmarks/gateway.py --sessions 64 --turns 4 --tokens 100
    python benchmarks/gateway.py --engine-urls http://host:30000 http://host:30001 --tokenizer models/qwen3_8b

Without --engine-urls the engines are stubs in processes of their own, twice: at a pace (each request takes its tokens
at 50 a second, however many are open), which is how an engine looks that is not short of anything, and without one,
which shows how many turns a second each way can carry. The agents are in processes of their own too, asynchronous, and
keep every session busy. Each way gets the same prompts (as ids, or as the messages that become those ids), with
logprobs, and the same number of new tokens.

Every round runs all ways in a new order, each for at least --window-s; what is printed is the median over rounds of a
way's throughput relative to the engines alone *in the same round*, with its range. One short window is worth nothing:
0.1 s of it varied sevenfold on a busy machine, and once showed SMG five times as fast as the engines behind it. A
range that is wide, or a ratio above 1, says that the machine was measured, not the hop. CPU a turn is of the hop's own
processes, and less disturbed by what else runs. Stub engines count what arrives, and a way that skipped work fails.
On a machine with few cores engines, agents, proxy and SMG share them: unpaced ratios are then of all together.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from stub_engine import stub_reply

TOKENS_PER_S = 50.0  # of one paced session
TASK = "There is a small repository in /app. Its tests fail. Find out why, repair it, and say when you are done. "
OBSERVATION = "exit=0\n" + "drwxr-xr-x 2 agent agent 4096 src/module.py  def function(x): return x + 1\n" * 5
HOST = "127.0.0.1"
WAYS = ("engines", "smg", "proxy", "proxy + smg")
Run = tuple[float, list[float], int]  # wall seconds, seconds of each turn, tokens


@dataclass(frozen=True)
class Way:
    """One way for all requests. `hops`: the processes between agents and engines."""

    run: Callable[[], Awaitable[Run]]
    hops: Callable[[], list[int]]


def run_engine(channel: Connection, pool: list[int], eos: int) -> None:
    """/generate with SGLang's fields, and the little that SMG asks of an engine."""
    from aiohttp import web

    state = {"paced": True, "arrived": 0}

    async def generate(request: web.Request) -> web.Response:
        reply, count = stub_reply(await request.read(), pool, eos)
        state["arrived"] += 1
        if state["paced"]:
            await asyncio.sleep(count / TOKENS_PER_S)
        return web.json_response(reply)

    async def pace(request: web.Request) -> web.Response:
        state["paced"] = (await request.read()) == b"on"
        return web.Response()

    async def arrived(request: web.Request) -> web.Response:
        count, state["arrived"] = state["arrived"], 0
        return web.json_response(count)

    async def info(request: web.Request) -> web.Response:
        return web.json_response({"model_path": "stub", "is_generation": True, "weight_version": "0"})

    async def main() -> None:
        app = web.Application(client_max_size=2**28)
        app.router.add_post("/generate", generate)
        app.router.add_post("/pace", pace)
        app.router.add_post("/arrived", arrived)
        for path in ("/health", "/model_info", "/server_info"):
            app.router.add_get(path, info)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, HOST, 0, backlog=1024).start()
        channel.send(f"http://{HOST}:{runner.addresses[0][1]}")
        await asyncio.Event().wait()

    asyncio.run(main())


def run_agents(channel: Connection) -> None:
    """Answers ("chat", urls, turns) and ("generate", [(url, headers, bodies)]) with (seconds of each turn, tokens)."""
    import aiohttp

    async def chat(client: aiohttp.ClientSession, url: str, turns: int) -> tuple[list[float], int]:
        messages: list[Any] = [{"role": "user", "content": TASK}]
        seconds, tokens = [], 0
        for _ in range(turns):
            began = time.monotonic()
            async with client.post(f"{url}/chat/completions", json={"messages": messages}) as response:
                reply = json.loads(await response.read())
            if response.status != 200:
                raise RuntimeError(f"{url}: {response.status}: {reply}")
            seconds.append(time.monotonic() - began)
            tokens += reply["usage"]["completion_tokens"]
            messages += [reply["choices"][0]["message"], {"role": "user", "content": OBSERVATION}]
        return seconds, tokens

    async def generate(
        client: aiohttp.ClientSession, url: str, headers: dict[str, str], bodies: Sequence[bytes]
    ) -> tuple[list[float], int]:
        seconds, tokens = [], 0
        for body in bodies:
            began = time.monotonic()
            async with client.post(f"{url}/generate", data=body, headers=headers) as response:
                reply = json.loads(await response.read())
            if response.status != 200:
                raise RuntimeError(f"{url}: {response.status}: {reply}")
            seconds.append(time.monotonic() - began)
            tokens += len(reply["output_ids"])
        return seconds, tokens

    async def main() -> None:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=3600)) as client:
            while (order := await asyncio.to_thread(channel.recv)) is not None:
                if order[0] == "chat":
                    work = [chat(client, url, order[2]) for url in order[1]]
                else:
                    work = [generate(client, *one) for one in order[1]]
                done = await asyncio.gather(*work)
                channel.send(([s for seconds, _ in done for s in seconds], sum(tokens for _, tokens in done)))

    asyncio.run(main())


class Bench:
    """The processes of one measurement."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.context = multiprocessing.get_context("spawn")
        self.processes: list[Any] = []
        self.engine_urls: list[str] = list(arguments.engine_urls)
        self.stubs = not self.engine_urls
        self.prompts: list[list[list[int]]] = []  # [session][turn]: what the proxy sent

    def start(self) -> None:
        from rl360.gateway.tokenizer import TextTokenizer

        tokenizer = TextTokenizer.from_folder(self.arguments.tokenizer)
        pool = tokenizer.encode(OBSERVATION)
        eos = min(tokenizer.eos_ids)
        if self.stubs:
            self.engine_urls = [self._spawn(run_engine, pool, eos).recv() for _ in range(self.arguments.engines)]
        self.agents = [self._spawn(run_agents) for _ in range(self.arguments.agents)]

    def stop(self) -> None:
        for process in self.processes:
            process.terminate()
            process.join()

    def _spawn(self, target: Any, *args: Any) -> Connection:
        ours, theirs = self.context.Pipe()
        process = self.context.Process(target=target, args=(theirs, *args), daemon=True)
        process.start()
        self.processes.append(process)
        return ours

    async def pace(self, paced: bool) -> None:
        import aiohttp

        async with aiohttp.ClientSession() as client:
            for url in self.engine_urls:
                await client.post(f"{url}/pace", data=b"on" if paced else b"off")

    def order(self, kind: str, work: Sequence[Any], *rest: Any) -> Run:
        """All agents together."""
        began = time.monotonic()
        for index, agent in enumerate(self.agents):
            agent.send((kind, work[index :: len(self.agents)], *rest))
        answers = [agent.recv() for agent in self.agents]
        wall_s = time.monotonic() - began
        return wall_s, [s for seconds, _ in answers for s in seconds], sum(tokens for _, tokens in answers)

    async def gateway(self, kind: str, folder: Path, stack: AsyncExitStack) -> Way:
        """A gateway that stays for all rounds; each run opens sessions of its own."""
        from rl360.engine.workers import LocalWorkerGroup
        from rl360.gateway.direct import DirectGateway
        from rl360.gateway.smg import SmgGateway
        from rl360.types import AttemptSpec, Sampling, Task

        groups: list[LocalWorkerGroup] = []

        def make_workers(target: str, size: int, kwargs: Any, name: str) -> LocalWorkerGroup:
            groups.append(LocalWorkerGroup(target, size, kwargs, name=name, log_dir=folder / kind))
            return groups[-1]

        cls = DirectGateway if kind == "direct" else SmgGateway
        gateway: Any = cls(
            engine_urls=self.engine_urls,
            tokenizer_dir=self.arguments.tokenizer,
            worker_group_factory=make_workers,
            log_dir=folder / kind,
            request_timeout_s=600.0,
        )
        stack.push_async_callback(gateway.close)
        await gateway.start()
        runs = iter(range(10**9))

        async def run() -> Run:
            sampling = Sampling(max_new_tokens=self.arguments.tokens, max_context_tokens=10**6, max_turns=10**6)
            task, number = Task("bench", Path(), (), ""), next(runs)
            names = [f"{kind}{number}-{i}" for i in range(self.arguments.sessions)]
            specs = [AttemptSpec(name, "g", 0, task, sampling, i) for i, name in enumerate(names)]
            urls = [await gateway.open(spec) for spec in specs]
            result = await asyncio.to_thread(self.order, "chat", urls, self.arguments.turns)
            sessions = [await gateway.close_session(spec.try_id) for spec in specs]
            if any(session.engine_resends for session in sessions):
                raise RuntimeError("requests were sent again: not a clean measurement")
            if not self.prompts:
                self.prompts = [_prompts(session) for session in sessions]
            return result

        return Way(run, lambda: [group.pid(0) for group in groups])

    async def smg(self, folder: Path, stack: AsyncExitStack) -> Way:
        from rl360.gateway.ports import free_port
        from rl360.gateway.smg_worker import SmgWorker

        smg = SmgWorker(0, self.engine_urls, HOST, free_port(), free_port(), folder / "smg", smg_key="bench")
        await smg.start()
        stack.push_async_callback(smg.close)
        return Way(lambda: self.ids([smg.url()], "bench"), lambda: [int(smg.state()["pid"])])

    async def ids(self, urls: Sequence[str], key: str = "") -> Run:
        """The same prompts as ids, to the engines or to SMG."""
        from rl360.gateway.engine_client import generate_body
        from rl360.gateway.generation import sampling_params
        from rl360.gateway.smg_route import routing_key
        from rl360.types import Sampling

        work = []
        for index, turns in enumerate(self.prompts):
            params = sampling_params(Sampling(), self.arguments.tokens, index)
            run = f"{len(urls)}-{time.monotonic_ns()}"
            bodies = [generate_body(prompt, params, f"{run}.{index}.{turn}") for turn, prompt in enumerate(turns)]
            headers = {"Content-Type": "application/json", **routing_key(f"{run}.{index}")}
            work.append(
                (urls[index % len(urls)], {**headers, **({"Authorization": f"Bearer {key}"} if key else {})}, bodies)
            )
        return await asyncio.to_thread(self.order, "generate", work)

    async def arrived(self) -> int:
        """Requests that the stub engines got since the last call."""
        import aiohttp

        async with aiohttp.ClientSession() as client:
            total = 0
            for url in self.engine_urls:
                async with client.post(f"{url}/arrived") as response:
                    total += int(await response.json())
        return total

    async def window(self, way: Way) -> tuple[float, float, float]:
        """(tokens/s, median seconds of a turn, CPU seconds of the hops a turn) over at least --window-s."""
        wall_s, tokens, seconds = 0.0, 0, []
        if self.stubs:
            await self.arrived()
        cpu_s = _cpu_s(way.hops())
        while wall_s < self.arguments.window_s:
            run_s, turns, sampled = await way.run()
            wall_s, tokens, seconds = wall_s + run_s, tokens + sampled, seconds + turns
        cpu_s = _cpu_s(way.hops()) - cpu_s
        if self.stubs and (got := await self.arrived()) != len(seconds):
            raise RuntimeError(f"{len(seconds)} turns were answered, the engines got {got} requests")
        return tokens / wall_s, statistics.median(seconds), cpu_s / len(seconds)

    async def measure(self, folder: Path) -> None:
        async with AsyncExitStack() as stack:
            if self.stubs:
                await self.pace(False)
            ways = {
                "proxy": await self.gateway("direct", folder, stack),
                "proxy + smg": await self.gateway("smg", folder, stack),
                "smg": await self.smg(folder, stack),
                "engines": Way(lambda: self.ids(self.engine_urls), list),
            }
            for name in (
                "proxy",
                "proxy + smg",
                "smg",
                "engines",
            ):  # connections and caches; the proxy makes the prompts
                await ways[name].run()
            for paced in (True, False) if self.stubs else (False,):
                if self.stubs:
                    await self.pace(paced)
                rounds = []
                for _ in range(self.arguments.rounds):
                    order = random.sample(WAYS, len(WAYS))
                    rounds.append({name: await self.window(ways[name]) for name in order})
                _report(rounds, "paced" if paced else "without a pace")


def _report(rounds: Sequence[dict[str, tuple[float, float, float]]], title: str) -> None:
    print(f"{title}: {len(rounds)} rounds; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    for name in WAYS:
        rates = [found[name][0] for found in rounds]
        ratios = sorted(found[name][0] / found["engines"][0] for found in rounds)
        print(
            f"  {name:12} {statistics.median(rates):8.0f} tokens/s ({min(rates):.0f} to {max(rates):.0f})  a turn "
            f"{1000 * statistics.median(found[name][1] for found in rounds):6.0f} ms  CPU of the hops "
            f"{1000 * statistics.median(found[name][2] for found in rounds):5.2f} ms a turn  "
            f"ratio {statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})",
            flush=True,
        )


def _cpu_s(pids: Sequence[int]) -> float:
    """CPU seconds of these processes and of those that they started."""
    import psutil

    found = {one for pid in pids for one in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True))}
    return sum(one.cpu_times().user + one.cpu_times().system for one in found)


def _prompts(session: Any) -> list[list[int]]:
    """The prompt of each turn: the ids before each run of sampled ones."""
    (segment,) = session.segments
    ids, mask = segment.token_ids_T.tolist(), segment.loss_mask_T.tolist()
    starts = [i for i, sampled in enumerate(mask) if sampled and not mask[i - 1]]
    return [ids[:start] for start in starts]


def main() -> None:
    from rl360.models.fetch import default_models_dir

    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=100, help="new tokens a turn")
    parser.add_argument("--engines", type=int, default=2, help="stub engine processes")
    parser.add_argument("--agents", type=int, default=2, help="processes that play the agents")
    parser.add_argument("--engine-urls", nargs="*", default=[], help="real engines instead of stubs")
    parser.add_argument("--tokenizer", type=Path, default=default_models_dir() / "smollm2_135m")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--window-s", type=float, default=3.0, help="least seconds of one way in one round")
    bench = Bench(parser.parse_args())
    try:
        bench.start()
        with tempfile.TemporaryDirectory(prefix="rl360-gateway-") as folder:
            asyncio.run(bench.measure(Path(folder)))
    finally:
        bench.stop()


if __name__ == "__main__":
    main()
