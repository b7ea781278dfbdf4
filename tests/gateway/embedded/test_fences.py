"""Turns that end with a code block, against the real server: by fences and by the expression they are the same ones."""

from __future__ import annotations

import re
from array import array
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, models

from rl360.gateway.embedded.server import EngineServer
from rl360.gateway.engine_client import HttpEngine
from rl360.gateway.engine_pool import EnginePool, Generation
from rl360.gateway.generation import CODE_BLOCK_REGEX
from rl360.gateway.routes import LeastLoaded
from rl360.types import Sampling
from tests.gateway.embedded.conftest import EOS, VOCAB, write_tiny_folder

PIECES = ["```", "`", "``", "```python\n", "\n", "x = 1", " or ", "```\n", "a", "b", "c", "d"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a tokenizer that finds fences in whatever it samples: ids share a few texts."""
    folder = write_tiny_folder(tmp_path_factory.mktemp("fences"))
    vocab = {f"{PIECES[index % len(PIECES)]}#{index}": index for index in range(VOCAB)}
    del vocab[next(text for text, index in vocab.items() if index == EOS)]
    tokenizer = Tokenizer(models.WordLevel({**vocab, "<|end|>": EOS}, unk_token="<|end|>"))
    tokenizer.decoder = decoders.Sequence([decoders.Replace(Regex("#[0-9]+$"), ""), decoders.Fuse()])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_by_fences_and_by_the_expression_turns_are_the_same(make_engine, folder, temperature):
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    server = EngineServer(make_engine(folder, start=False, version=2, deterministic=True))
    server.start()

    def decode(ids):
        return tokenizer.decode(list(ids), skip_special_tokens=False)

    sampling = Sampling(temperature=temperature, stop_at_code_block=True)

    async def turns(name: str, split_above: int | None) -> list[Generation]:
        route = LeastLoaded([HttpEngine(server.url, request_timeout_s=60)])
        pool = EnginePool(route, 60, decode, [EOS], split_above)
        prompts = [array("i", [index, 3 * index + 1, 200 - index]) for index in range(20)]
        found = [
            await pool.generate(name, f"{name}.{index}", prompt, sampling, 60, seed=index)
            for index, prompt in enumerate(prompts)
        ]
        await pool.close()
        return found

    try:
        by_expression = await turns("expression", None)
        by_fences = await turns("fences", 59)
    finally:
        server.close()
    for expression, fences in zip(by_expression, by_fences, strict=True):
        assert fences.token_ids == expression.token_ids
        assert fences.logprobs == pytest.approx(expression.logprobs, abs=1e-4)
        assert (fences.finish_type, fences.interruptions) == (expression.finish_type, 0)
        assert fences.version_spans == expression.version_spans
    closed = [turn for turn in by_fences if re.search(CODE_BLOCK_REGEX, decode(turn.token_ids))]
    assert len(closed) > 5
    assert all(len(turn.engine_says) > 1 for turn in closed)
    if temperature == 0.0:
        assert any(turn.finish_type == "length" and len(turn.engine_says) > 1 for turn in by_fences)
