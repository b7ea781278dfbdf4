"""What each token is shown as."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl360.engine.codec import attempt_to_json
from rl360.viewer.tokens import TokenTexts, logprob_level, model_folders, segment_tokens
from tests.engine.records import make_spec
from tests.tiny_model import write_tiny_llama
from tests.viewer.runs import hostile


@pytest.fixture(scope="module")
def tiny_texts(tmp_path_factory) -> TokenTexts:
    return TokenTexts([write_tiny_llama(tmp_path_factory.mktemp("model"), weights=False)])


def encode(texts: TokenTexts, text: str) -> list[int]:
    texts.texts([0])
    return list(texts._tokenizer.encode(text, add_special_tokens=False).ids)


def test_pieces_of_a_code_answer(tiny_texts):
    ids = encode(tiny_texts, "<|im_start|>assistant\ndef f():\n  return the")
    assert tiny_texts.texts(ids)[:3] == ["<|im_start|>", "assistant", "\n"]
    assert tiny_texts.texts(ids)[-2:] == [" return", " the"]


def test_a_character_of_four_tokens_is_shown_with_the_last(tiny_texts):
    assert tiny_texts.texts(encode(tiny_texts, "a\U0001f600b")) == ["a", "", "", "", "\U0001f600", "b"]


@settings(deadline=None, max_examples=60)
@given(text=st.text(alphabet=st.characters(blacklist_categories=["Cs"]), max_size=40))
def test_pieces_joined_are_the_text(tiny_texts, text):
    ids = encode(tiny_texts, text)
    whole = tiny_texts._tokenizer.decode(ids, skip_special_tokens=False)
    assert "".join(tiny_texts.texts(ids)) == whole


@pytest.mark.model
def test_pieces_of_a_real_tokenizer(smollm2_dir):
    texts = TokenTexts([smollm2_dir])
    text = "Grüße, 世界! \U0001f469\u200d\U0001f680\n```python\ndef f(x):\n    return x\n```<|im_end|>"
    ids = encode(texts, text)
    assert "".join(texts.texts(ids)) == text
    assert "".join(texts.texts(ids[20:], before=ids[4:20])) == text[len("".join(texts.texts(ids)[:20])) :]


def test_ids_that_no_vocabulary_has(tiny_texts):
    assert len(tiny_texts.texts([5, 10_000_000, 6])) == 3


def test_mask_logprob_and_version_of_each_token(tmp_path):
    segment = attempt_to_json(hostile(make_spec()))["segments"][0]
    texts = TokenTexts([tmp_path])
    tokens = segment_tokens(segment, texts, 3, 10)
    assert [t.position for t in tokens] == list(range(3, 10))
    assert [t.token_id for t in tokens] == list(range(3, 10))
    assert [t.sampled for t in tokens] == [False, *[True] * 6]
    assert [t.version for t in tokens] == [None, 0, 0, 0, 0, 1, 1]
    assert tokens[0].logprob is None
    assert tokens[1].logprob == pytest.approx(-6 * 4 / 11, abs=1e-6)  # linspace(0, -6, 12)[4]
    assert all(t.text is None for t in tokens)
    assert "tokenizer.json" in texts.problem


def test_levels_by_hand():
    probabilities = (1.0, 0.96, 0.94, 0.7, 0.4, 0.1, 0.02, 0.001)
    assert [logprob_level(math.log(p)) for p in probabilities] == [0, 0, 1, 2, 3, 4, 5, 6]


def test_where_the_tokenizer_is_looked_for():
    run = Path("run")
    assert model_folders(run, {"model": {"path": "/m/x", "name": "x"}}) == [Path("/m/x"), run / "checkpoints" / "hf"]
    named = {"model": {"path": None, "name": "x"}, "paths": {"models": "/m"}}
    assert model_folders(run, named) == [Path("/m/x"), run / "checkpoints" / "hf"]
    assert model_folders(run, {}) == [run / "checkpoints" / "hf"]


def test_a_broken_tokenizer_file_is_passed_over(tmp_path):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "tokenizer.json").write_text("{")
    good = write_tiny_llama(tmp_path / "good", weights=False)
    assert TokenTexts([tmp_path / "broken", good]).texts([1]) == ["<|im_start|>"]
    assert TokenTexts([tmp_path / "broken"]).texts([1]) is None
