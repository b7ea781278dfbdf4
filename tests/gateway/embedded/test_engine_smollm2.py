"""The engine on a real language model: the same text as transformers, and it follows an instruction."""

from __future__ import annotations

import pytest
import torch

from rl360.gateway.embedded.engine import EmbeddedEngine
from rl360.gateway.embedded.request import Request
from rl360.models.loading import load_decoder

from .conftest import Run

QUESTIONS = ("Write a Python function that adds two numbers.", "What is the capital of France?", "Count to five.")


@pytest.mark.model
def test_greedy_text_equals_transformers(smollm2_dir):
    from transformers import AutoModelForCausalLM

    engine = EmbeddedEngine(load_decoder(smollm2_dir), smollm2_dir, kv_cache_gib=0.1, num_threads=1)
    engine.start()
    prompts = [
        engine.tokenizer.encode(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n").ids
        for text in QUESTIONS
    ]
    # The third question comes twice: its second answer starts from the first one's keys and values.
    requests: list[Request] = Run(engine).all(
        [*prompts, prompts[2]], temperature=0, max_new_tokens=24, ignore_eos=False
    )
    engine.close()
    model = AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32)
    for prompt, request in zip([*prompts, prompts[2]], requests, strict=True):
        out = model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False, pad_token_id=2)
        assert request.output_ids == out[0, len(prompt) :].tolist()
    assert requests[3].cached_tokens == len(prompts[2]) - 1
    assert "Paris" in engine.tokenizer.decode(requests[1].output_ids)
