"""K2 Horizon for transformers against sums by hand, and the decoder against it: two codes that share nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl360.models.decoder import RMSNorm, causal_attend
from rl360.models.k2_horizon_hf import GroupedRMSNorm, K2HorizonConfig, K2HorizonForCausalLM, register
from rl360.models.loading import load_decoder, save_hf
from rl360.models.tiny import write_tiny

TOKENS = [5, 17, 3, 88, 41, 9, 60, 22, 13, 75, 8, 31]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny(tmp_path / "k2", "k2_horizon", seed=3)


def reference(folder: Path, **options: Any) -> K2HorizonForCausalLM:
    from transformers import AutoModelForCausalLM

    register()
    options.setdefault("dtype", torch.float32)
    model = AutoModelForCausalLM.from_pretrained(folder, **options).eval()
    assert isinstance(model, K2HorizonForCausalLM)
    return model


def test_the_norm_by_hand():
    # Groups (3, 4) and (6, 8): root mean squares sqrt(12.5) and sqrt(50). One group would divide all by sqrt(31.25).
    norm = GroupedRMSNorm(4, groups=2, eps=0.0)
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([1.0, 1.0, 2.0, 1.0]))
    out = norm(torch.tensor([[3.0, 4.0, 6.0, 8.0]]))
    torch.testing.assert_close(out, torch.tensor([[0.848528, 1.131371, 1.697056, 1.131371]]))


def test_eps_is_inside_the_root():
    # (1, -1): mean square 1, and eps 3 gives sqrt(4).
    torch.testing.assert_close(GroupedRMSNorm(2, 1, 3.0)(torch.tensor([1.0, -1.0])), torch.tensor([0.5, -0.5]))


def test_the_weight_is_multiplied_before_the_cast():
    # 3/sqrt(5) = 1.341641 is 1.34375 in bfloat16. Times 1.0078125: 1.352122 and so 1.3515625; cast first, it is
    # 1.35424... and so 1.3515625 or 1.359375: the exact product decides.
    norm = GroupedRMSNorm(2, 1, 0.0).bfloat16()
    with torch.no_grad():
        norm.weight.fill_(1.0078125)
    x = torch.tensor([3.0, 1.0], dtype=torch.bfloat16)
    exact = (x.double() / 5.0**0.5 * 1.0078125).bfloat16()
    assert torch.equal(norm(x), exact)


@given(st.integers(0, 2**31), st.sampled_from([1, 2, 3, 4]), st.sampled_from([torch.float32, torch.bfloat16]))
def test_both_norms_agree(seed: int, groups: int, dtype: torch.dtype):
    generator = torch.Generator().manual_seed(seed)
    one, other = GroupedRMSNorm(24, groups, 1e-6), RMSNorm(24, 1e-6, groups)
    weight = torch.rand(24, generator=generator) + 0.5
    with torch.no_grad():
        one.weight.copy_(weight)
        other.weight.copy_(weight)
    x = (torch.randn(5, 24, generator=generator) * 10 ** torch.randint(-2, 3, (5, 1), generator=generator)).to(dtype)
    one, other = one.to(dtype), other.to(dtype)
    # With one group the decoder's is Llama's, which casts before it multiplies.
    bits = 1e-6 if dtype is torch.float32 else 2**-7 if groups == 1 else 2**-8
    torch.testing.assert_close(one(x), other(x), rtol=bits, atol=bits)


def test_groups_do_not_see_each_other():
    norm = GroupedRMSNorm(8, 2, 1e-6)
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    louder = x.clone()
    louder[:, :4] *= 7
    torch.testing.assert_close(norm(louder), norm(x), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(GroupedRMSNorm(8, 1, 1e-6)(louder), GroupedRMSNorm(8, 1, 1e-6)(x), atol=1e-2)


def test_logits_and_gradients_equal_the_decoders(folder):
    decoder, model = load_decoder(folder), reference(folder)
    ids_T = torch.tensor(TOKENS)
    expected_TV = model(ids_T[None]).logits[0]
    logits_TV = decoder.logits(decoder.hidden(ids_T, torch.arange(len(TOKENS)), causal_attend()))
    torch.testing.assert_close(logits_TV, expected_TV, atol=2e-5, rtol=2e-5)
    expected_TV.logsumexp(-1).sum().backward()
    logits_TV.logsumexp(-1).sum().backward()
    names = [name for name, _ in model.named_parameters()]
    assert sorted(names) == sorted(name for name, _ in decoder.named_parameters())
    for name in names:
        torch.testing.assert_close(
            decoder.get_parameter(name).grad, model.get_parameter(name).grad, atol=1e-4, rtol=1e-4, msg=name
        )


def test_the_groups_matter_in_the_comparison(folder):
    """A decoder with plain norms is far away: the parity above is about something."""
    raw = json.loads((folder / "config.json").read_text())
    expected = reference(folder)(torch.tensor([TOKENS])).logits
    (folder / "config.json").write_text(json.dumps({**raw, "layernorm_num_groups": 1}))
    assert (reference(folder)(torch.tensor([TOKENS])).logits - expected).abs().max() > 0.1


def test_generation_with_the_cache_equals_generation_without(folder):
    model = reference(folder)
    ids = torch.tensor([TOKENS, TOKENS[::-1]])
    options: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12, "do_sample": False}
    with_cache = model.generate(ids, use_cache=True, pad_token_id=1, **options)
    assert torch.equal(with_cache, model.generate(ids, use_cache=False, pad_token_id=1, **options))
    assert with_cache.shape[1] > ids.shape[1]


def test_a_saved_model_loads_again_and_in_the_decoder(folder, tmp_path):
    model = reference(folder)
    model.save_pretrained(tmp_path / "saved")
    raw = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert (raw["model_type"], raw["architectures"]) == ("k2_horizon", ["K2HorizonForCausalLM"])
    assert raw["layernorm_num_groups"] == 4
    ids = torch.tensor([TOKENS])
    with torch.no_grad():
        torch.testing.assert_close(reference(tmp_path / "saved")(ids).logits, model(ids).logits, atol=0, rtol=0)
        decoder = load_decoder(tmp_path / "saved")
        logits = decoder.logits(decoder.hidden(ids[0], torch.arange(len(TOKENS)), causal_attend()))
        torch.testing.assert_close(logits, model(ids).logits[0], atol=2e-5, rtol=2e-5)


def test_what_the_trainer_publishes_loads_here_and_keeps_the_configuration(folder, tmp_path):
    decoder = load_decoder(folder)
    with torch.no_grad():
        decoder.model.layers[1].mlp.up_proj.weight.mul_(1.5)
    out = save_hf(decoder, tmp_path / "published", source=folder)
    with torch.no_grad():
        expected = decoder.logits(decoder.hidden(torch.tensor(TOKENS), torch.arange(len(TOKENS)), causal_attend()))
        torch.testing.assert_close(reference(out)(torch.tensor([TOKENS])).logits[0], expected, atol=2e-5, rtol=2e-5)
    assert (out / "configuration_k2_horizon.py").read_bytes() == (folder / "configuration_k2_horizon.py").read_bytes()


def test_a_new_model_starts_with_norms_of_one():
    config = K2HorizonConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, layernorm_num_groups=2, rope_theta=1e7,
    )  # fmt: skip
    model = K2HorizonForCausalLM(config)
    norms = [parameter for name, parameter in model.named_parameters() if "norm" in name]
    assert len(norms) == 3
    assert all(torch.equal(norm, torch.ones(16)) for norm in norms)
    assert sum(isinstance(module, GroupedRMSNorm) for module in model.modules()) == 3


def test_a_width_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="10 values do not divide into 4 groups"):
        GroupedRMSNorm(10, 4, 1e-6)
