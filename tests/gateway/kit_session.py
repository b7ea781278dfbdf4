"""Sessions on the stub engine, in this process, driven the way an agent would."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import datetime
from functools import cache
from typing import Any

from rl360.gateway.engine_pool import EnginePool
from rl360.gateway.parsers import make_parser
from rl360.gateway.replies import Services
from rl360.gateway.routes import LeastLoaded
from rl360.gateway.session import ProxySession
from rl360.gateway.templates import ChatTemplate
from rl360.types import AttemptSpec
from tests.gateway.kit import END_OF_TURN, THINKING, tokenizer_of
from tests.gateway.stub_engine import StubEngine, StubModel


@cache
def template_of(name: str) -> ChatTemplate:
    return ChatTemplate(tokenizer_of(name), clock=lambda: datetime(2026, 1, 2))


class Agent:
    """One session and an agent that talks to it."""

    def __init__(
        self, template: str, spec: AttemptSpec, services: Services, model: StubModel, engine: StubEngine
    ) -> None:
        self.template = template
        self.model = model
        self.engine = engine
        self.session = ProxySession(spec, services)

    async def ask(self, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        """A chat completion that is read to the end."""
        request, options = await self.session.read(json.dumps({"messages": messages, **fields}).encode())
        call = self.session.call(request)
        with call.attended():
            payload = await self.session.answer(call, options)
            call.delivered = True
        return payload

    async def say(self, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        """As `ask`; returns only the assistant message."""
        return dict((await self.ask(messages, **fields))["choices"][0]["message"])


@contextmanager
def agent(
    template: str = "chatml",
    spec: AttemptSpec | None = None,
    timeout_s: float = 5.0,
    num_engines: int = 1,
    **sampling: Any,
) -> Iterator[Agent]:
    """An agent on a fresh session. Thinking templates get the Qwen 3 parser, all of them Hermes tool calls."""
    from tests.gateway.kit import attempt_spec

    tokenizer = tokenizer_of(template)
    end = tokenizer.id_of(END_OF_TURN[template])
    assert end is not None
    model = StubModel(tokenizer, end)
    engines = [StubEngine(model, f"stub://{i}") for i in range(num_engines)]
    parser = make_parser("hermes", "qwen3" if template in THINKING else "none")
    with ThreadPoolExecutor(2) as executor:
        pool = EnginePool(LeastLoaded(engines), timeout_s, tokenizer.decode)
        services = Services(tokenizer, template_of(template), parser, pool, executor)
        yield Agent(template, spec or attempt_spec(**sampling), services, model, engines[0])
