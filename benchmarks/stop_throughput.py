"""Turns a second of SGLang where a closed code block ends a turn: by its expression, and fence by fence.

    python benchmarks/stop_throughput.py --model FOLDER --new-tokens 96 256 1024 --out FILE

One server, and the session proxy before it (`gateway=direct`). The same questions are asked at temperature 1 in legs
that differ in how the end of a turn is looked for: `none` (only the end of turn and the cap), `expression`
(`stop_regex`, by SGLang after each token) and `fences` (a string, and on after those that close nothing: EnginePool).
Legs take turns, and the caches are flushed between them. `none` samples longer answers, so it is compared by tokens a
second; the other two sample the same distribution. A turn's requests are counted in the proxy's replies.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.final_logits import QUESTIONS
from benchmarks.serving_throughput import flush, gpu_names, make_gateway, one_server, post_all

LEGS: Mapping[str, tuple[bool, int | None]] = {  # whether a code block ends a turn, EnginePool's split_above
    "none": (False, None),
    "expression": (True, None),
    "fences": (True, 0),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="HF folder with a tokenizer and a chat template")
    parser.add_argument("--command", default=f"{sys.executable} -m sglang.launch_server")
    parser.add_argument("--extra", default="", help="more flags of the server")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--context-length", type=int, default=2048)
    parser.add_argument("--sessions", type=int, default=256, help="turns open at once")
    parser.add_argument("--turns", type=int, default=512, help="of one leg")
    parser.add_argument("--new-tokens", type=int, nargs="+", default=[96, 256, 1024])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--budget-s", type=float, default=1e9, help="no leg begins later than so long after the start")
    parser.add_argument("--logs", type=Path, default=Path("/tmp/rl360-stop"))
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    found = asyncio.run(measure(asked))
    text = json.dumps(found, indent=1)
    print(text)
    if asked.out:
        asked.out.write_text(text + "\n")
    return 0


async def measure(asked: argparse.Namespace) -> dict[str, Any]:
    began = time.monotonic()
    fleet = one_server(asked)
    (url,) = await asyncio.to_thread(fleet.start)
    start_s = time.monotonic() - began
    rows: list[dict[str, Any]] = []
    try:
        await leg(asked, url, "none", min(asked.new_tokens), 0)  # compiles kernels
        for number in range(asked.rounds):
            for new_tokens in sorted(asked.new_tokens, reverse=True):
                for name in LEGS:
                    if time.monotonic() - began < asked.budget_s:
                        await flush(url)
                        rows.append(await leg(asked, url, name, new_tokens, number))
                        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    finally:
        await asyncio.to_thread(fleet.close)
    return {
        "model": asked.model.name,
        "sessions": asked.sessions,
        "turns_per_leg": asked.turns,
        "cores": len(os.sched_getaffinity(0)),
        "device": gpu_names(),
        "server_start_s": round(start_s, 1),
        "fences_by_expression": ratios(rows),
        "legs": rows,
    }


def ratios(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Tokens a second fence by fence over those by the expression, medians of the rounds, by the cap."""
    rates: dict[tuple[int, str], list[float]] = {}
    for row in rows:
        rates.setdefault((row["new_tokens"], row["leg"]), []).append(row["tokens_per_s"])
    caps = sorted(
        {cap for cap, name in rates if name == "fences"} & {cap for cap, name in rates if name == "expression"}
    )
    medians = {key: statistics.median(found) for key, found in rates.items()}
    return {str(cap): round(medians[cap, "fences"] / medians[cap, "expression"], 3) for cap in caps}


async def leg(asked: argparse.Namespace, url: str, name: str, new_tokens: int, number: int) -> dict[str, Any]:
    from rl360.types import AttemptSpec, Sampling, Task

    stops, split_above = LEGS[name]
    gateway = make_gateway("direct", url, asked, split_above=split_above)
    sampling = Sampling(
        max_new_tokens=new_tokens, max_context_tokens=asked.context_length, max_turns=1, stop_at_code_block=stops
    )
    await gateway.start()
    try:
        task = Task("bench", Path("bench"), (), "")
        specs = [
            AttemptSpec(f"{name}-{new_tokens}-{number}-{i}", "g", 0, task, sampling, i) for i in range(asked.turns)
        ]
        sends = []
        for index, base in enumerate([await gateway.open(spec) for spec in specs]):
            question = f"Exercise {index}. Explain in two sentences how you would write a Python function that "
            question += f"{QUESTIONS[index % len(QUESTIONS)]}, then write it in one fenced code block."
            body = {"model": "policy", "messages": [{"role": "user", "content": question}]}
            sends.append((f"{base}/chat/completions", json.dumps(body).encode()))
        replies: list[bytes] = []
        seconds = await post_all(sends, asked.sessions, replies.append)
    finally:
        await gateway.close()
    return row(name, new_tokens, seconds, [json.loads(raw) for raw in replies])


def row(name: str, new_tokens: int, seconds: float, replies: list[dict[str, Any]]) -> dict[str, Any]:
    tokens = sum(reply["usage"]["completion_tokens"] for reply in replies)
    ends = [reply["choices"][0]["finish_reason"] for reply in replies]
    return {
        "leg": name,
        "new_tokens": new_tokens,
        "seconds": round(seconds, 3),
        "tokens_per_s": round(tokens / seconds, 1),
        "turns_per_s": round(len(replies) / seconds, 2),
        "tokens_a_turn": round(tokens / len(replies), 1),
        "requests_a_turn": round(sum(len(reply["rl360"]["engine"]) for reply in replies) / len(replies), 3),
        "ended_by_cap": round(ends.count("length") / len(ends), 3),
    }


if __name__ == "__main__":
    sys.exit(main())
