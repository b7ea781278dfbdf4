"""Tokens a second of SGLang by itself, and through the session proxy and SMG, for identical requests.

    python benchmarks/serving_throughput.py --model FOLDER [--command "python -m sglang.launch_server"] --out FILE

Starts a fleet of one server with the fleet's own code. Both legs send the same prompts (the direct one as the ids that
the proxy makes of the messages), `return_logprob`, the same sampling parameters, from the same async client with as
many requests open as there are sessions. The legs take turns, so that both see the same machine. A request is a session
of one turn: opening it is outside the clock, as it is between attempts of a run.

With --stop-regex each leg is run a second time, in turn with the first, ending answers at a closed code block:
"alone+stop" has SGLang look for `stop_regex` after each token; "direct+stop" does what a run with
`rollout.stop_at_code_block` does: the same up to 256 new tokens, and beyond them it stops at each fence and goes on
after those that close nothing. Requests are as long as without it but for answers with a whole code block in them;
tokens are counted, not assumed.

Prints and writes JSON: every leg's tokens/s, and the ratio of their medians against the project's bar.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

LEAST_SHARE = 0.90  # of SGLang's own throughput: the project's bar, for an 8B at 256 sessions
COMPLETION_TOKENS = re.compile(rb'"completion_tokens":\s*(\d+)')
WORDS = (
    "river",
    "stone",
    "cloud",
    "tree",
    "engine",
    "letter",
    "window",
    "garden",
    "number",
    "silver",
    "paper",
    "signal",
)
TIMEOUT_S = 1800.0


@dataclass(frozen=True)
class Leg:
    name: str
    seconds: float
    tokens: int
    requests: int

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


def main() -> int:
    arguments = _arguments()
    found = asyncio.run(_measure(arguments))
    text = json.dumps(found, indent=1)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="HF folder with a tokenizer and a chat template")
    parser.add_argument("--command", default=f"{sys.executable} -m sglang.launch_server")
    parser.add_argument("--extra", default="", help="more flags of the server")
    parser.add_argument("--load-format", default=None, help="dummy: random weights")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--context-length", type=int, default=4096)
    parser.add_argument("--sessions", type=int, default=256, help="requests open at once")
    parser.add_argument("--requests", type=int, default=1024, help="of one leg")
    parser.add_argument("--prompt-words", type=int, default=300)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--gateways", default="direct,smg", help="what is measured beside the server itself")
    parser.add_argument("--stop-regex", action="store_true", help="each leg also with a stop at the closed code block")
    parser.add_argument("--device", action="append", default=[], help="of the visible GPUs from 0; none: all")
    parser.add_argument("--logs", type=Path, default=Path("/tmp/rl360-serving"))
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def one_server(arguments: argparse.Namespace, load_format: str | None = None, numbers: Sequence[str] = ()) -> Any:
    """A fleet of one server that nobody watches, not started. numbers: of its GPUs, among the visible ones from 0."""
    from rl360.engine.engines import every_device
    from rl360.serving.command import ServerFlags, launches
    from rl360.serving.fleet import Fleet, WatchSettings
    from rl360.serving.ports import claim_ports

    flags = ServerFlags(
        arguments.model,
        arguments.context_length,
        command=tuple(shlex.split(arguments.command)),
        dtype=arguments.dtype,
        load_format=load_format,
        extra_args=tuple(shlex.split(arguments.extra)),
    )
    devices = [every_device()[int(number)] for number in numbers]
    plan = launches(flags, claim_ports(1, 0).pairs, devices)
    return Fleet(plan, arguments.logs, WatchSettings(health_interval_s=3600.0))


async def _measure(arguments: argparse.Namespace) -> dict[str, Any]:
    fleet = one_server(arguments, arguments.load_format, arguments.device)
    began = time.monotonic()
    (url,) = await asyncio.to_thread(fleet.start)
    start_s = time.monotonic() - began
    legs: list[Leg] = []
    try:
        prompts = _prompts(arguments)
        samplings = {"": _sampling(arguments)}  # by what is added to the names of legs
        if arguments.stop_regex:
            samplings["+stop"] = replace(samplings[""], stop_at_code_block=True)
        bodies = {suffix: _direct_bodies(arguments, prompts, sampling) for suffix, sampling in samplings.items()}
        first = bodies[""][: arguments.sessions]
        await _direct(url, first, arguments.sessions)  # compiles kernels, fills the pools
        for number in range(arguments.rounds):
            for suffix, sampling in samplings.items():
                await flush(url)
                legs.append(await _direct(url, bodies[suffix], arguments.sessions, suffix))
                for gateway in filter(None, arguments.gateways.split(",")):
                    await flush(url)
                    legs.append(await _through(gateway, url, arguments, prompts, number, sampling, suffix))
    finally:
        await asyncio.to_thread(fleet.close)
    return _report(arguments, legs, start_s)


def _report(arguments: argparse.Namespace, legs: list[Leg], start_s: float) -> dict[str, Any]:
    by_name: dict[str, list[Leg]] = {}
    for leg in legs:
        by_name.setdefault(leg.name, []).append(leg)
    medians = {name: statistics.median(leg.tokens_per_s for leg in some) for name, some in by_name.items()}
    shares = {name: round(rate / medians["alone"], 4) for name, rate in medians.items() if name != "alone"}
    return {
        "model": arguments.model.name,
        "sessions": arguments.sessions,
        "new_tokens": arguments.new_tokens,
        "requests_per_leg": arguments.requests,
        "cores": len(os.sched_getaffinity(0)),
        "device": gpu_names(),
        "server_start_s": round(start_s, 1),
        "tokens_per_s": {name: round(rate, 1) for name, rate in medians.items()},
        "share_of_alone": shares,
        "bar": LEAST_SHARE,
        "legs": [{**asdict(leg), "tokens_per_s": round(leg.tokens_per_s, 1)} for leg in legs],
    }


def _prompts(arguments: argparse.Namespace) -> list[str]:
    """Texts that differ from their first word on, so that no prefix is shared beyond the template's."""
    rng = random.Random(0)
    return [
        f"Story {number}: " + " ".join(rng.choice(WORDS) for _ in range(arguments.prompt_words))
        for number in range(arguments.requests)
    ]


def _sampling(arguments: argparse.Namespace) -> Any:
    from rl360.types import Sampling

    return Sampling(max_new_tokens=arguments.new_tokens, max_context_tokens=arguments.context_length, max_turns=1)


def _direct_bodies(arguments: argparse.Namespace, prompts: list[str], sampling: Any) -> list[bytes]:
    """The bodies that the proxy sends for these prompts."""
    from rl360.gateway.generation import sampling_params
    from rl360.gateway.templates import ChatTemplate
    from rl360.gateway.tokenizer import TextTokenizer

    template = ChatTemplate(TextTokenizer.from_folder(arguments.model))
    bodies = []
    for number, prompt in enumerate(prompts):
        ids = template.start([{"role": "user", "content": prompt}], [], {}).token_ids
        params = sampling_params(sampling, arguments.new_tokens, number + 1)
        body = {"input_ids": list(ids), "sampling_params": params, "return_logprob": True, "stream": False}
        bodies.append(json.dumps({**body, "rid": f"alone-{number}"}).encode())
    return bodies


async def _open_at_once(name: str, sends: list[tuple[str, bytes]], at_once: int) -> Leg:
    """Counts the tokens that the replies report."""
    tokens = 0

    def count(raw: bytes) -> None:
        nonlocal tokens
        tokens += int(COMPLETION_TOKENS.findall(raw)[-1])

    seconds = await post_all(sends, at_once, count)
    return Leg(name, seconds, tokens, len(sends))


async def post_all(sends: Iterable[tuple[str, bytes]], at_once: int, take: Callable[[bytes], None]) -> float:
    """POST every (URL, body), `at_once` at a time; returns the seconds. Ends the program with what is no answer."""
    import aiohttp

    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=TIMEOUT_S)
    remaining = iter(sends)

    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as client:

        async def work() -> None:
            for url, body in remaining:
                async with client.post(url, data=body, headers={"Content-Type": "application/json"}) as response:
                    raw = await response.read()
                if response.status != 200:
                    raise SystemExit(f"{url}: {response.status} {raw[:300]!r}")
                take(raw)

        began = time.monotonic()
        await asyncio.gather(*(work() for _ in range(at_once)))
        return time.monotonic() - began


async def _direct(url: str, bodies: list[bytes], at_once: int, suffix: str = "") -> Leg:
    return await _open_at_once(f"alone{suffix}", [(f"{url}/generate", body) for body in bodies], at_once)


async def _through(
    kind: str,
    url: str,
    arguments: argparse.Namespace,
    prompts: list[str],
    number: int,
    sampling: Any,
    suffix: str,
) -> Leg:
    from rl360.types import AttemptSpec, Task

    gateway = make_gateway(kind, url, arguments)
    await gateway.start()
    try:
        task = Task("bench", Path("bench"), (), "")
        specs = [AttemptSpec(f"{kind}{number}-{index}", "g", 0, task, sampling, index) for index in range(len(prompts))]
        bases = [await gateway.open(spec) for spec in specs]
        sends = []
        for base, prompt in zip(bases, prompts, strict=True):
            body = {"model": "policy", "messages": [{"role": "user", "content": prompt}]}
            sends.append((f"{base}/chat/completions", json.dumps(body).encode()))
        return await _open_at_once(f"{kind}{suffix}", sends, arguments.sessions)
    finally:
        await gateway.close()


def make_gateway(kind: str, url: str, arguments: argparse.Namespace, **changes: Any) -> Any:
    from rl360.engine.workers import LocalWorkerGroup

    def workers(target: str, size: int, kwargs: Mapping[str, Any], name: str) -> LocalWorkerGroup:
        env = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        return LocalWorkerGroup(target, size, kwargs, name=name, log_dir=arguments.logs, env=env)

    common = {
        "engine_urls": [url],
        "tokenizer_dir": arguments.model,
        "worker_group_factory": workers,
        "log_dir": arguments.logs,
        "request_timeout_s": TIMEOUT_S,
        **changes,
    }
    if kind == "smg":
        from rl360.gateway.smg import SmgGateway

        return SmgGateway(**common)
    from rl360.gateway.direct import DirectGateway

    return DirectGateway(**common)


async def flush(url: str) -> None:
    """No leg profits from the prefixes of another."""
    import urllib.request

    def post() -> None:
        request = urllib.request.Request(f"{url}/flush_cache?timeout=10", data=b"{}", method="POST")
        urllib.request.urlopen(request, timeout=60).close()

    await asyncio.sleep(1.0)
    await asyncio.to_thread(post)


def gpu_names() -> str:
    try:
        asked = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip().replace("\n", ", ")
    except (OSError, subprocess.CalledProcessError):
        return "cpu"


if __name__ == "__main__":
    sys.exit(main())
