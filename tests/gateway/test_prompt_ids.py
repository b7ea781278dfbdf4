"""A session's prompts as JSON: the same as json's own, whatever the next prompt shares with the last."""

from __future__ import annotations

import json
from array import array

from hypothesis import given
from hypothesis import strategies as st

from rl360.gateway.prompt_ids import IdText

IDS = st.lists(st.integers(0, 2**31 - 1), max_size=12)


@given(st.lists(st.tuples(st.integers(0, 12), IDS), max_size=8))
def test_each_prompt_is_its_own_json(steps: list[tuple[int, list[int]]]) -> None:
    text, ids = IdText(), []
    for kept, new in steps:
        ids = ids[:kept] + new
        prompt = text.of(array("i", ids))
        assert json.loads(b"[" + prompt.json + b"]") == ids == list(prompt)
        assert (len(prompt), list(prompt[1:])) == (len(ids), ids[1:])


def test_a_prompt_given_away_does_not_change() -> None:
    text = IdText()
    first = text.of(array("i", [1, 2]))
    text.of(array("i", [1, 2, 3]))
    text.of(array("i", [7]))
    assert (first.json, list(first)) == (b"1,2", [1, 2])
