"""Several chats at once in one session, with clients that hang up: what was read is kept once, the rest not at all."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from rl360.types import Session
from tests.gateway.kit_session import Agent, agent

LONGEST_S = 0.004  # of one stub request and of a client's patience: enough to interleave


async def branch(driven: Agent, rng: random.Random, messages: list[dict[str, Any]], read: dict[str, Any]) -> None:
    """One chat of a few turns; sometimes the client gives up on a turn, and asks again or asks something else."""
    for _ in range(rng.randint(1, 4)):
        while True:
            driven.model.delay_s = rng.uniform(0, LONGEST_S)
            asking = asyncio.create_task(driven.ask(messages, return_token_ids=True))
            if rng.random() < 0.4:
                await asyncio.sleep(rng.uniform(0, LONGEST_S))
                asking.cancel()
            try:
                payload = await asking
            except asyncio.CancelledError:
                if rng.random() < 0.5:
                    messages = [*messages[:-1], {"role": "user", "content": f"instead {rng.random()}"}]
                continue
            break
        read[payload["id"]] = payload
        messages = [*messages, payload["choices"][0]["message"], {"role": "user", "content": rng.choice("ab")}]


async def run(driven: Agent, rng: random.Random) -> tuple[Session, dict[str, Any]]:
    read: dict[str, Any] = {}
    first = await driven.ask([{"role": "user", "content": "hello"}], return_token_ids=True)
    read[first["id"]] = first
    shared = [{"role": "user", "content": "hello"}, first["choices"][0]["message"], {"role": "user", "content": "go"}]
    await asyncio.gather(*(branch(driven, rng, shared, read) for _ in range(rng.randint(1, 4))))
    return await driven.session.close(), read


@pytest.mark.parametrize("seed", range(40))
async def test_what_was_read_is_kept_once(seed: int) -> None:
    with agent(max_turns=10_000) as driven:
        session, read = await run(driven, random.Random(seed))
    kept = sum(int(segment.loss_mask_T.sum()) for segment in session.segments)
    assert kept == sum(len(payload["choices"][0]["token_ids"]) for payload in read.values())
    assert len(session.turns) == len(read)
    for payload in read.values():
        prompt, ids = payload["prompt_token_ids"], payload["choices"][0]["token_ids"]
        start, end = len(prompt), len(prompt) + len(ids)
        owners = [
            segment
            for segment in session.segments
            if segment.token_ids_T[:end].tolist() == [*prompt, *ids] and segment.loss_mask_T[start:end].all()
        ]
        assert len(owners) == 1
    for turn in session.turns:
        assert 0 <= turn.segment < len(session.segments)
