"""Agents against the real proxy and a scripted engine: every template, every dialect.

`meeting` runs one agent through one session and returns the record, what the engine sampled and what the agent said.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from rl360.gateway.proxy import ProxyWorker
from rl360.gateway.tokenizer import TextTokenizer
from rl360.types import Session
from tests.agents.kit import LocalEnvironment, Terminal, make
from tests.gateway.kit import END_OF_TURN, THINKING, attempt_spec, backend_json, write_folder
from tests.gateway.stub_engine import Fault, Sample, StubModel, serve

IFM = "ifm"
TEMPLATES = (*sorted(END_OF_TURN), IFM)  # the real SmolLM2's is a test of its own
_IFM_SPECIAL = ["<|ifm|begin_of_text|>", "<|ifm|im_start|>", "<|ifm|im_end|>"]
_IFM_MARKUP = [
    f"<{slash}ifm|{name}>"
    for name in ("think", "tool_calls", "tool_call", "arg_key", "arg_value")
    for slash in ("", "/")
]


@cache
def _ifm_backend() -> str:
    backend = Tokenizer.from_str(backend_json())
    backend.add_special_tokens(_IFM_SPECIAL)
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in _IFM_MARKUP])
    return str(backend.to_str())


def folder_of(template: str, where: Path) -> Path:
    """A checkpoint folder without weights. `smollm2` has a folder already."""
    if template != IFM:
        return write_folder(where, template)
    where.mkdir(parents=True, exist_ok=True)
    (where / "tokenizer.json").write_text(_ifm_backend())
    names = {"bos_token": _IFM_SPECIAL[0], "eos_token": "<|endoftext|>"}
    source = Path(__file__).with_name("ifm.jinja").read_text()
    (where / "tokenizer_config.json").write_text(json.dumps({**names, "chat_template": source}))
    end = Tokenizer.from_str(_ifm_backend()).token_to_id(_IFM_SPECIAL[2])
    (where / "generation_config.json").write_text(json.dumps({"eos_token_id": [end, 0]}))
    return where


def end_of(template: str, tokenizer: TextTokenizer) -> int:
    text = {IFM: _IFM_SPECIAL[2], "smollm2": "<|im_end|>"}.get(template) or END_OF_TURN[template]
    found = tokenizer.id_of(text)
    assert found is not None
    return found


def parsers_of(template: str) -> dict[str, str]:
    if template == IFM:
        return {"tool_parser": "k2_horizon", "reasoning_parser": "k2_horizon"}
    return {"tool_parser": "hermes", "reasoning_parser": "qwen3" if template in THINKING else "none"}


def call(template: str, name: str, **arguments: Any) -> str:
    """One tool call as a model of this template writes it."""
    if template == IFM:
        pairs = [
            f"<ifm|arg_key>{key}</ifm|arg_key>\n<ifm|arg_value>{value}</ifm|arg_value>\n"
            for key, value in arguments.items()
        ]
        return f"<ifm|tool_calls>\n<ifm|tool_call>{name}\n{''.join(pairs)}</ifm|tool_call>\n</ifm|tool_calls>"
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def malformed(template: str) -> str:
    if template == IFM:
        return "<ifm|tool_calls><ifm|tool_call>bash\nls</ifm|tool_call></ifm|tool_calls>"
    return '<tool_call>\n{"name": bash}\n</tool_call>'


def thought(template: str, text: str) -> str:
    """The text behind some thinking, where the template's models think."""
    if template == IFM:
        return f"let me see\n</ifm|think>{text}"
    if template == "always_thinks":
        return f"let me see\n</think>\n\n{text}"
    return f"<think>\nlet me see\n</think>\n\n{text}" if template in THINKING else text


@dataclass
class Meeting:
    session: Session
    samples: list[Sample]
    metadata: dict[str, Any]
    error: Exception | None = None
    environment: LocalEnvironment | None = None
    forks: list[str] = field(default_factory=list)


async def meeting(
    agent: Callable[..., Any],
    template: str,
    folder: Path,
    script: Sequence[str],
    *,
    faults: Sequence[Fault] = (),
    instruction: str = "Do it.",
    checkpoint: Path | None = None,
    options: dict[str, Any] | None = None,
    **sampling: Any,
) -> Meeting:
    """One agent, one session. The policy says `script`, then random ids. The agent's errors come back with the rest."""
    from harbor.models.agent.context import AgentContext

    where = checkpoint or folder_of(template, folder / "model")
    tokenizer = TextTokenizer.from_folder(where)
    model = StubModel(tokenizer, end_of(template, tokenizer))
    model.script.extend(script)
    model.faults.extend(faults)
    spec = attempt_spec(**{"max_new_tokens": 4000, **sampling})
    context, environment = AgentContext(), LocalEnvironment(folder / "sandbox")
    error = None
    async with serve(model) as url:
        proxy = ProxyWorker(0, [url], where, log_dir=folder / "logs", request_timeout_s=20.0, **parsers_of(template))
        await proxy.start()
        try:
            made = make(agent, folder, proxy.open(spec), **(options or {}))
            if hasattr(made, "_max_episodes"):
                made._session = Terminal()  # terminus-2: its tmux session
            try:
                await made.run(instruction, environment, context)
            except Exception as raised:
                error = raised
            session = await proxy.close_session(spec.try_id)
        finally:
            await proxy.close()
    forks = [segment.fork_reason for segment in session.segments if segment.fork_reason]
    return Meeting(session, model.samples, dict(context.metadata or {}), error, environment, forks)
