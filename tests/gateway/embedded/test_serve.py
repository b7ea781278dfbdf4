"""`python -m rl360.gateway.embedded.serve`: what its flags make of the engine. As a process: tests/serving."""

from __future__ import annotations

import pytest
import torch

from rl360.gateway.embedded.serve import _server, parser


@pytest.mark.parametrize("fp32_logits", [True, False])
def test_sglangs_flags_for_final_logits(tiny_folder, fp32_logits):
    flags = ["--enable-fp32-lm-head", "--enable-tf32-matmul"] if fp32_logits else []
    asked, ignored = parser().parse_known_args(
        ["--model-path", str(tiny_folder), "--dtype", "bfloat16", "--kv-cache-gib", "0.01", "--threads", "1", *flags]
    )
    assert set(ignored) == set(flags) - {"--enable-fp32-lm-head"}  # TF32 is a matter of GPUs
    engine = _server(asked).engine
    assert (engine.decoder.dtype, engine.fp32_logits) == (torch.bfloat16, fp32_logits)
