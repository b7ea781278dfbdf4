"""The state machine on token lists small enough to read, with a renderer that gives each message one token."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from rl360.gateway.messages import CanonicalMessage, canonical, digest, normalise
from rl360.gateway.templates import Boundary, CannotExtend, Rendering
from rl360.gateway.tokens import ForkReason, Plan, Sampled, TokenHistory
from rl360.types import VersionSpan

NO_BOUNDARY = Boundary(0, hash(""))


@dataclass(frozen=True)
class Request:
    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    template_arguments: Mapping[str, Any] = None  # type: ignore[assignment]

    @property
    def history(self) -> tuple[CanonicalMessage, ...]:
        return tuple(canonical(message) for message in self.messages)

    @property
    def context_digest(self) -> bytes:
        return digest(self.tools)


class OneTokenEach:
    """A message "user 7" is the token 7; the generation prompt is the token 0."""

    refuses = False

    def start(self, messages: Sequence[Mapping[str, Any]], tools: Any, arguments: Any) -> Rendering:
        return Rendering([*(int(m["content"]) for m in messages), 0], NO_BOUNDARY, "0")

    def extend(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampled: Sequence[int],
        boundaries: Sequence[Boundary],
        last_id: int,
        tools: Any,
        arguments: Any,
    ) -> Rendering:
        assert len(sampled) == len(boundaries)
        if self.refuses:
            raise CannotExtend("template_rewrites_history")
        return self.start(messages[sampled[-1] + 1 :], tools, arguments)


def user(token: int) -> dict[str, Any]:
    return normalise({"role": "user", "content": str(token)}, "m")


def said(token: int) -> dict[str, Any]:
    return normalise({"role": "assistant", "content": str(token)}, "m")


def sampled(*ids: int, version: int = 0) -> Sampled:
    return Sampled(ids, [-0.5] * len(ids), (VersionSpan(version, 0, len(ids)),))


def turn(history: TokenHistory, *messages: dict[str, Any], ids: tuple[int, ...], version: int = 0) -> tuple[int, Plan]:
    """One answered request; the message returned for ids (7, 8) is "assistant 7"."""
    plan = history.reserve(history.plan(Request(messages)))
    return history.commit(plan, sampled(*ids, version=version), canonical(said(ids[0]))), plan


def records(history: TokenHistory) -> list[tuple[list[int], list[int], int | None, str | None]]:
    segments, _ = history.segments()
    return [(s.token_ids_T.tolist(), s.loss_mask_T.astype(int).tolist(), s.parent, s.fork_reason) for s in segments]


def test_a_chat_is_one_segment() -> None:
    history = TokenHistory(OneTokenEach())
    turn(history, user(1), ids=(50, 51))
    turn(history, user(1), said(50), user(2), ids=(60,), version=1)
    turn(history, user(1), said(50), user(2), said(60), user(3), ids=(70, 71), version=1)
    ids = [1, 0, 50, 51, 2, 0, 60, 3, 0, 70, 71]
    mask = [0, 0, 1, 1, 0, 0, 1, 0, 0, 1, 1]
    assert records(history) == [(ids, mask, None, None)]
    (segment,), _ = history.segments()
    assert segment.version_spans == (VersionSpan(0, 2, 4), VersionSpan(1, 6, 7), VersionSpan(1, 9, 11))
    assert segment.logprobs_T.tolist() == [-0.5 * m for m in mask]
    assert segment.prompt_length == 2


def test_a_changed_message_forks_and_carries_the_shared_turns_as_context() -> None:
    history = TokenHistory(OneTokenEach())
    turn(history, user(1), ids=(50,))
    turn(history, user(1), said(50), user(2), ids=(60,))
    index, plan = turn(history, user(1), said(50), user(9), ids=(61, 62))
    assert (index, plan.num_new_ids, plan.first_new_message) == (1, 2, 2)
    assert records(history) == [
        ([1, 0, 50, 2, 0, 60], [0, 0, 1, 0, 0, 1], None, None),
        ([1, 0, 50, 9, 0, 61, 62], [0, 0, 0, 0, 0, 1, 1], 0, "history_edited"),
    ]
    assert turn(history, user(1), said(50), user(2), said(60), user(3), ids=(70,))[0] == 0  # the first goes on
    assert turn(history, user(1), said(50), user(9), said(61), user(3), ids=(71,))[0] == 1  # and so does the fork
    assert [mask for _, mask, _, _ in records(history)] == [
        [0, 0, 1, 0, 0, 1, 0, 0, 1],
        [0, 0, 0, 0, 0, 1, 1, 0, 0, 1],
    ]


def test_each_reason_to_start_anew() -> None:
    history = TokenHistory(OneTokenEach())
    turn(history, user(1), ids=(50,))
    turn(history, user(2), ids=(51,))
    turn(history, user(1), said(99), user(2), ids=(52,))
    plan = history.plan(Request((user(1), said(50), user(2)), tools=({"name": "f"},)))
    history.commit(history.reserve(plan), sampled(53), canonical(said(53)))
    assert [fork for *_, fork in records(history)] == [None, "new_conversation", "history_edited", "context_changed"]
    assert [parent for _, _, parent, _ in records(history)] == [None] * 4


def test_a_template_that_cannot_extend_starts_a_segment_with_the_whole_as_context() -> None:
    renderer = OneTokenEach()
    history = TokenHistory(renderer)
    turn(history, user(1), ids=(50, 51))
    renderer.refuses = True
    turn(history, user(1), said(50), user(2), ids=(60,))
    assert records(history)[1] == ([1, 50, 2, 0, 60], [0, 0, 0, 0, 1], 0, "template_rewrites_history")


def test_two_requests_at_once_do_not_share_a_segment() -> None:
    history = TokenHistory(OneTokenEach())
    turn(history, user(1), ids=(50,))
    plans = [history.plan(Request((user(1), said(50), user(n)))) for n in (2, 3)]
    first, second = history.reserve(plans[0]), history.reserve(plans[1])
    third = history.reserve(history.plan(Request((user(1), said(50), user(4)))))
    for plan, token in ((third, 64), (second, 63), (first, 62)):
        history.commit(plan, sampled(token), canonical(said(token)))
    assert records(history) == [
        ([1, 0, 50, 2, 0, 62], [0, 0, 1, 0, 0, 1], None, None),
        ([1, 0, 50, 4, 0, 64], [0, 0, 0, 0, 0, 1], 0, "concurrent_request"),
        ([1, 0, 50, 3, 0, 63], [0, 0, 0, 0, 0, 1], 0, "concurrent_request"),
    ]


def test_two_first_requests_at_once() -> None:
    history = TokenHistory(OneTokenEach())
    plans = [history.reserve(history.plan(Request((user(n),)))) for n in (1, 2)]
    for plan in plans:
        history.commit(plan, sampled(50), canonical(said(50)))
    assert [fork for *_, fork in records(history)] == [None, ForkReason.CONCURRENT_REQUEST]


def test_a_released_segment_can_be_continued() -> None:
    history = TokenHistory(OneTokenEach())
    turn(history, user(1), ids=(50,))
    history.release(history.reserve(history.plan(Request((user(1), said(50), user(2))))))
    assert turn(history, user(1), said(50), user(3), ids=(60,))[0] == 0
    assert len(records(history)) == 1


def test_a_dropped_turn_leaves_no_trace() -> None:
    history = TokenHistory(OneTokenEach())
    turn(history, user(1), ids=(50,))
    before = records(history)
    index, _ = turn(history, user(1), said(50), user(2), ids=(60, 61), version=1)
    assert history.drop_last_turn(index)
    assert records(history) == before
    assert turn(history, user(1), said(50), user(3), ids=(70,))[0] == index
    assert records(history) == [([1, 0, 50, 3, 0, 70], [0, 0, 1, 0, 0, 1], None, None)]


def test_a_dropped_first_turn_takes_its_segment_along_and_indices_move() -> None:
    history = TokenHistory(OneTokenEach())
    turn(history, user(1), ids=(50,))
    turn(history, user(2), ids=(51,))
    turn(history, user(2), said(51), user(3), ids=(52,))
    turn(history, user(2), said(51), user(4), ids=(53,))
    assert history.drop_last_turn(0)
    segments, place = history.segments()
    assert place == {1: 0, 2: 1}
    assert [s.parent for s in segments] == [None, 0]


def test_a_turn_that_a_fork_carries_is_kept() -> None:
    history = TokenHistory(OneTokenEach())
    turn(history, user(1), ids=(50,))
    plans = [history.reserve(history.plan(Request((user(1), said(50), user(n))))) for n in (2, 3)]
    history.commit(plans[1], sampled(60), canonical(said(60)))
    history.release(plans[0])
    assert not history.drop_last_turn(0)


def test_counts_that_disagree_are_refused() -> None:
    with pytest.raises(ValueError, match="2 ids, 1 logprobs, 2 with a version"):
        Sampled([1, 2], [-0.1], (VersionSpan(0, 0, 2),))


def test_ids_are_kept_small() -> None:
    history = TokenHistory(OneTokenEach())
    _, plan = turn(history, user(1), ids=(50,))
    assert isinstance(plan.prompt_ids, array)
    assert plan.prompt_ids.itemsize == 4
    assert history.prefix(0, 2) == [1, 0]
