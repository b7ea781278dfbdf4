"""Attempts through JSON and back, to the bit."""

from __future__ import annotations

import base64
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rl360.engine.codec import attempt_from_json, attempt_to_json, plain, restored
from rl360.types import Purpose, Score, Segment, Stop, VersionSpan
from tests.engine.records import assert_same_attempt, make_attempt, make_spec


def through_json(attempt):
    return attempt_from_json(json.loads(json.dumps(attempt_to_json(attempt), allow_nan=False)))


def test_a_whole_attempt_comes_back_equal():
    attempt = make_attempt(make_spec(member=3, try_number=2, purpose=Purpose.EVAL))
    assert_same_attempt(attempt, through_json(attempt))


def test_an_attempt_without_trial_scores_or_segments_comes_back_equal():
    attempt = replace(make_attempt(make_spec(), reward=None), segments=(), turns=(), trial=None)
    assert_same_attempt(attempt, through_json(attempt))


def test_a_viewer_reads_the_row_without_this_code():
    row = json.loads(json.dumps(attempt_to_json(make_attempt(make_spec(), reward=0.5))))
    assert row["spec"]["try_id"] == "i0-a-0.t0"
    assert (row["reward"], row["success"], row["valid"]) == (0.5, False, True)
    (segment,) = row["segments"]
    assert segment["token_ids"] == [1, 2, 3, 5, 6, 7]
    assert segment["sampled"] == [[3, 6]]
    logprobs = np.frombuffer(base64.b64decode(segment["logprobs_f32le"]), "<f4")
    np.testing.assert_allclose(logprobs, [0, 0, 0, -3 / 7, -4 / 7, -5 / 7], rtol=1e-6)


def test_values_that_json_lacks_come_back():
    attempt = make_attempt(make_spec())
    assert attempt.trial is not None
    odd = {"nan": math.nan, "inf": -math.inf, "path": Path("a"), "array": np.arange(3), "set": {1}, "obj": object}
    trial = replace(attempt.trial, rewards={"reward": math.nan}, agent_metadata=odd)
    scores = {"verifier": Score(math.nan, 0.0, valid=False, cause="nan")}
    back = through_json(replace(attempt, trial=trial, scores=scores, stop=Stop.AGENT_ERROR))
    assert back.trial is not None
    assert back.trial.rewards is not None
    assert math.isnan(back.trial.rewards["reward"])
    assert math.isnan(back.scores["verifier"].raw or 0.0)
    metadata = back.trial.agent_metadata
    assert metadata["inf"] == -math.inf
    assert (metadata["path"], metadata["array"], metadata["set"]) == ("a", [0, 1, 2], [1])
    assert metadata["obj"] == repr(object)


def test_a_row_of_a_later_format_is_refused():
    with pytest.raises(ValueError, match="format 99"):
        attempt_from_json({**attempt_to_json(make_attempt(make_spec())), "format": 99})


floats32 = st.floats(width=32, allow_nan=True, allow_infinity=True)


@st.composite
def segments(draw):
    size = draw(st.integers(0, 30))
    return Segment(
        draw(hnp.arrays(np.int32, size)),
        draw(hnp.arrays(np.bool_, size)),
        draw(hnp.arrays(np.float32, size, elements=floats32)),
        tuple(VersionSpan(*s) for s in draw(st.lists(st.tuples(*[st.integers(0, 99)] * 3), max_size=3))),
        draw(st.none() | st.integers(0, 5)),
        draw(st.none() | st.text(max_size=5)),
    )


@given(st.lists(segments(), max_size=3))
def test_any_arrays_come_back_to_the_bit(found):
    attempt = replace(make_attempt(make_spec()), segments=tuple(found))
    assert_same_attempt(attempt, through_json(attempt))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=10,
)


@given(json_values)
def test_free_form_data_comes_back(value):
    back = restored(json.loads(json.dumps(plain(value), allow_nan=False)))
    assert repr(back) == repr(value)
