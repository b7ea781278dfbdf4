"""The first request of a run, hop by hop: which field training needs and does not get, and where it is lost.

In: clients of the engines, and of SMG where it stands between. Out: nothing, or one EngineError that names every
missing field and the hop that lost it. Left to others: the session proxy's own hop (direct.py).

The question is made so that a lost part of it shows in the answer: the engine says how many prompt ids it got, echoes
the rid, and samples as many tokens as were asked for.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl360.errors import EngineError
from rl360.gateway.engine_client import HttpEngine, generate_body, reply_problem
from rl360.gateway.generation import mix_seed, read_reply, sampling_params
from rl360.gateway.smg_route import ROUTED_TO, routing_key
from rl360.types import Sampling

PROMPT_TOKENS = 48  # enough that a cut request shows, few enough for any model
NEW_TOKENS = 4
NEEDED = (  # in the order in which they are told
    "output_ids",
    "meta_info.output_token_logprobs",
    "meta_info.finish_reason",
    "meta_info.weight_version",
    "meta_info.id",
    "meta_info.prompt_tokens",
    "meta_info.completion_tokens",
)
QUOTED_CHARS = 200


@dataclass(frozen=True, slots=True)
class Question:
    """One request of /generate."""

    input_ids: Sequence[int]
    params: Mapping[str, Any]
    rid: str


@dataclass(frozen=True, slots=True)
class _Answer:
    """What one hop said. `error`: it gave no reply at all."""

    reply: Mapping[str, Any]
    problems: tuple[str, ...]
    error: EngineError | None = None
    engine_url: str = ""


def make_question(ids: Sequence[int], rid: str) -> Question:
    """`ids`: some tokens of the model, repeated to a prompt."""
    prompt = (list(ids) * PROMPT_TOKENS)[:PROMPT_TOKENS]
    return Question(prompt, sampling_params(Sampling(), NEW_TOKENS, mix_seed(0, 0)), rid)


def reply_problems(reply: Mapping[str, Any], question: Question) -> list[str]:
    """Everything that training would miss in a reply to the question, by field."""
    problems = [f"{path} is missing" for path in NEEDED if _get(reply, path) is None]
    if problems:
        return problems
    if broken := reply_problem(reply):
        return [broken]
    try:
        read = read_reply(reply, "the reply")
    except EngineError as error:
        return [str(error)]
    if read.finish_type == "abort":
        return ["it aborted the first request: is it paused?"]
    return list(_disagreements(reply, question, len(read.token_ids), read.finish_type))


def _disagreements(reply: Mapping[str, Any], question: Question, num_sampled: int, finish: str) -> Iterator[str]:
    meta, sent = reply["meta_info"], len(question.input_ids)
    wanted = int(question.params["max_new_tokens"])
    if meta["prompt_tokens"] != sent:
        yield f"the engine got {meta['prompt_tokens']} prompt ids, {sent} were sent: the request's length was changed"
    if meta["id"] != question.rid:
        yield f"meta_info.id is {meta['id']!r}, the request's rid was {question.rid!r}: it was dropped or changed"
    if meta["completion_tokens"] != num_sampled:
        yield f"meta_info.completion_tokens is {meta['completion_tokens']}, {num_sampled} tokens came"
    if num_sampled > wanted or (finish == "length" and num_sampled != wanted):
        yield f"{num_sampled} tokens came, {wanted} were asked for: max_new_tokens was dropped or changed"
    if above := [row[0] for row in meta["output_token_logprobs"] if row[0] > 0]:
        yield f"meta_info.output_token_logprobs above 0: {above}"


def dropped_fields(direct: Mapping[str, Any], through: Mapping[str, Any]) -> list[str]:
    """Paths of the fields that the engine's own answer has and the one through a hop has not."""
    return sorted(set(_paths(direct)) - set(_paths(through)))


async def verify_hops(
    engines: Sequence[HttpEngine], smg: HttpEngine | None, question: Question, timeout_s: float
) -> None:
    """Ask every engine directly, and one of them through SMG.

    Raises EngineError: what is missing, and which hop lost it.

    The cause is that of the first engine that gave no reply at all, else `engine_reply`.
    """
    answers = dict(
        zip(
            [engine.url for engine in engines],
            await asyncio.gather(*(_ask(engine, question, timeout_s, {}) for engine in engines)),
            strict=True,
        )
    )
    lines = [f"engine {url}: {_told(answer)}" for url, answer in answers.items() if answer.problems]
    failed = [answer for answer in answers.values() if answer.problems]
    if smg is not None:
        again = Question(question.input_ids, question.params, question.rid + ".smg")
        through = await _ask(smg, again, timeout_s, routing_key(question.rid))
        if line := _smg_line(smg.url, through, answers):
            lines.append(line)
            failed.append(through)
    if lines:
        cause = next((answer.error.cause for answer in failed if answer.error is not None), "engine_reply")
        raise EngineError(cause, "the first request: " + "; ".join(lines))


def _smg_line(url: str, through: _Answer, answers: Mapping[str, _Answer]) -> str | None:
    direct = answers.get(through.engine_url)
    if through.error is None and direct is None:
        return f"smg at {url}: it asked {through.engine_url or 'an unnamed engine'}, which is not in the serving set"
    if direct is None:
        fine = [engine for engine, answer in answers.items() if not answer.problems]
        return f"smg at {url}: {_told(through)}" + (f"; asked directly, {', '.join(fine)} answered" if fine else "")
    lost = [f"{path} is missing" for path in dropped_fields(direct.reply, through.reply)]
    problems = list(dict.fromkeys([*through.problems, *lost]))
    if not problems or (direct.problems and not lost):
        return None  # the engine's own doing, told already
    return f"smg at {url} lost it, {through.engine_url} asked directly does not: {'; '.join(problems)}"


def _told(answer: _Answer) -> str:
    return "; ".join(answer.problems)


async def _ask(client: HttpEngine, question: Question, timeout_s: float, headers: Mapping[str, str]) -> _Answer:
    body = generate_body(question.input_ids, question.params, question.rid)
    try:
        status, raw, said = await client.exchange("POST", "/generate", body, timeout_s, headers)
        engine_url = said.get(ROUTED_TO, "")
        if status >= 400:
            raise EngineError(f"engine_status_{status}", f"{client.url}/generate: {_quote(raw)}")
    except EngineError as error:
        return _Answer({}, (str(error),), error)
    try:
        reply = json.loads(raw)
    except ValueError:
        return _Answer({}, (f"the reply's {len(raw)} bytes are no JSON: {_quote(raw)}",), engine_url=engine_url)
    if not isinstance(reply, dict):
        return _Answer({}, (f"the reply is no object: {_quote(raw)}",), engine_url=engine_url)
    return _Answer(reply, tuple(reply_problems(reply, question)), engine_url=engine_url)


def _get(reply: Mapping[str, Any], path: str) -> Any:
    node: Any = reply
    for part in path.split("."):
        node = node.get(part) if isinstance(node, Mapping) else None
    return node


def _paths(node: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in node.items():
        yield prefix + key
        if isinstance(value, Mapping):
            yield from _paths(value, f"{prefix}{key}.")


def _quote(raw: bytes) -> str:
    return raw[:QUOTED_CHARS].decode(errors="replace")
