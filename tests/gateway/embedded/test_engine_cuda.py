"""The embedded engine on a GPU: bf16 weights that a trainer there shares."""

from __future__ import annotations

import pytest
import torch

from rl360.gateway.embedded.engine import EmbeddedEngine
from rl360.models.decoder import causal_attend
from rl360.models.loading import load_decoder

from .conftest import Run
from .test_engine import random_prompt


@pytest.mark.gpu
@torch.no_grad()
def test_logprobs_equal_an_fp32_forward_on_the_cpu(tiny_folder):
    """Requests that share a prefix, join late and go on under new weights, as in a run."""
    exact = load_decoder(tiny_folder)
    engine = EmbeddedEngine(load_decoder(tiny_folder, "cuda", torch.bfloat16), tiny_folder, kv_cache_gib=0.1, seed=5)
    engine.start()
    try:
        run = Run(engine)
        shared = random_prompt(1, 40)
        prompts = [shared, [*shared, 5], random_prompt(2, 300), [7]]
        requests = [*run.all(prompts, max_new_tokens=25), run.one([*shared, 9], max_new_tokens=25)]
        engine.set_version(1)
        requests.append(run.one(shared, max_new_tokens=25))
        assert requests[-1].version_spans() == [{"version": 1, "start": 0, "end": 25}]
    finally:
        engine.close()
    for request in requests:
        ids = torch.tensor(request.tokens[: request.length].tolist())
        logits = exact.logits(exact.hidden(ids, torch.arange(len(ids)), causal_attend()))
        expected = torch.log_softmax(logits[request.prompt_tokens - 1 : -1], -1)
        expected = expected.gather(1, torch.tensor(request.output_ids)[:, None])[:, 0]
        assert (torch.tensor(request.logprobs) - expected).abs().mean() < 0.05
