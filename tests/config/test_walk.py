from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl360.config.schemas import ComposedConfig
from rl360.config.walk import Walker, fits_type


@dataclass
class Inner:
    rate: float = 0.5
    names: list[str] = field(default_factory=list)


@dataclass
class Outer:
    count: int = 1
    label: str | None = None
    on: bool = False
    inner: Inner = field(default_factory=Inner)
    maybe: Inner | None = None
    by_name: dict[str, Inner] = field(default_factory=dict)
    free: dict[str, Any] = field(default_factory=dict)


def walk(values: Any) -> tuple[dict, list[str]]:
    walker = Walker({"inner": "torch"})
    return walker.section(values, Outer), walker.problems


def test_what_fits_is_kept_as_it_is():
    values = {"count": 3, "label": None, "on": True, "inner": {"rate": 1, "names": ["a"]}, "maybe": None}
    values |= {"by_name": {"x": {"rate": 2.0}}, "free": {"any": [1, {"deep": None}]}}
    assert walk(values) == (values, [])


def test_every_problem_is_named_and_what_is_wrong_is_left_out():
    kept, problems = walk(
        {"cuont": 2, "count": "many", "on": 1, "inner": {"rat": 1, "names": "a"}, "maybe": 7, "by_name": {"x": None}}
    )
    assert problems == [
        "cuont: unknown key; did you mean count?",
        "count: 'many' is text; expected a whole number",
        "on: 1 is a whole number; expected true or false",
        "inner.rat: unknown key for torch; did you mean rate?",
        "inner.names: 'a' is text; expected a list, such as [a, b]",
        "maybe: 7; expected a section with keys rate, names",
        "by_name.x: null is not allowed; expected a section",
    ]
    assert kept == {"inner": {}, "by_name": {}}


def test_missing_and_null_say_what_is_expected():
    _, problems = walk({"count": "???", "inner": {"rate": None, "names": [1.5, None]}})
    assert problems == [
        "count: needs a value; expected a whole number",
        "inner.rate: null is not allowed; expected a number",
        "inner.names[1]: null is not allowed; expected text",
    ]


@pytest.mark.parametrize(
    ("value", "hint", "fits"),
    [
        (True, int, False),
        (1, float, True),
        (1.0, int, False),
        (float("nan"), float, False),
        (float("inf"), float, False),
        ("1e-5", float, False),
        (7, str, True),
        (True, str, False),
        (0, bool, False),
    ],
)
def test_scalars(value, hint, fits):
    assert fits_type(value, hint) is fits


_words = st.text("abc._?${}:", max_size=8)  # a small alphabet: building one from all of Unicode takes seconds
_yaml = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | _words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_words, inner, max_size=3),
    max_leaves=8,
)
_keys = st.sampled_from(
    ["seed", "model", "algorithm", "trainer", "rollout", "reward", "tasks", "evaluation", "clip", ""]
)


@settings(deadline=None)
@given(st.dictionaries(_keys, _yaml, max_size=6))
def test_any_yaml_is_survived_and_what_is_kept_has_no_problem_left(values):
    first = Walker()
    kept = first.section(values, ComposedConfig)
    again = Walker()
    assert again.section(kept, ComposedConfig) == kept
    assert again.problems == []
