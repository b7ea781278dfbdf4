"""A tiny random Llama with a byte-level tokenizer: every byte is a token, so text and ids are easy to compare."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rl360.gateway.embedded.engine import EmbeddedEngine
from rl360.gateway.embedded.request import Request
from rl360.gateway.embedded.sampling import SamplingParams
from rl360.models.loading import load_decoder

EOS = 256
VOCAB = 260


def write_tiny_folder(folder: Path) -> Path:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(11)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        bos_token_id=257,
        eos_token_id=EOS,
        initializer_range=0.15,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: index for index, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(f"<|{name}|>", special=True) for name in ("end", "begin", "a", "b")])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    return folder


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def make_engine(tiny_folder: Path) -> Iterator[Callable[..., EmbeddedEngine]]:
    engines: list[EmbeddedEngine] = []

    def make(folder: Path | None = None, start: bool = True, **kwargs: Any) -> EmbeddedEngine:
        folder = folder or tiny_folder
        kwargs.setdefault("kv_cache_gib", 0.01)
        kwargs.setdefault("seed", 5)
        engine = EmbeddedEngine(load_decoder(folder), folder, num_threads=1, **kwargs)
        engines.append(engine)
        if start:
            engine.start()
        return engine

    yield make
    for engine in engines:
        engine.close()


class Run:
    """Submit to an engine and wait, from a test."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self.engine = engine
        self._events: dict[Request, threading.Event] = {}
        self._count = 0

    def submit(self, ids: list[int], on_token: Callable[[], None] | None = None, **params: Any) -> Request:
        done = threading.Event()
        self._count += 1
        params = {"max_new_tokens": 8, "ignore_eos": True, **params}
        rid = params.pop("rid", f"r{self._count}")
        request = self.engine.submit(ids, SamplingParams.from_json(params), rid, done.set, on_token)
        self._events[request] = done
        return request

    def wait(self, request: Request, timeout_s: float = 30.0) -> Request:
        assert self._events[request].wait(timeout_s), f"{request.rid} did not finish"
        return request

    def all(self, prompts: list[list[int]], **params: Any) -> list[Request]:
        """Submit while the engine is still, so that all are there at the same step; then wait."""
        with self.engine.drain():
            requests = [self.submit(prompt, **params) for prompt in prompts]
        return [self.wait(request) for request in requests]

    def one(self, prompt: list[int], **params: Any) -> Request:
        return self.wait(self.submit(prompt, **params))
