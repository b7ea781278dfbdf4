"""The decoder against transformers' own Llama and Qwen3, and the parts that those do not have by hand."""

from __future__ import annotations

import copy

import pytest
import torch

from rl360.errors import ConfigError
from rl360.models.decoder import DecoderConfig, RMSNorm, causal_attend, rotary_table, rotate
from rl360.models.linear import as_one
from rl360.models.loading import load_decoder

# Not token 2: transformers gives the padding id no embedding gradient, and pad equals eos here.
TOKENS = [5, 17, 3, 88, 41, 9, 60, 22, 13, 75, 8, 31]


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_logits_equal_transformers(hf_folder, kind, tied):
    folder, model = hf_folder(kind, tie_word_embeddings=tied)
    decoder = load_decoder(folder)
    ids_T = torch.tensor(TOKENS)
    with torch.no_grad():
        expected_TV = model(ids_T.unsqueeze(0)).logits[0]
        hidden_TC = decoder.hidden(ids_T, torch.arange(len(TOKENS)), causal_attend())
        torch.testing.assert_close(decoder.logits(hidden_TC), expected_TV, atol=1e-5, rtol=1e-5)


def test_gradients_equal_transformers(hf_folder):
    folder, model = hf_folder("qwen3", tie_word_embeddings=True)
    decoder = load_decoder(folder)
    ids_T = torch.tensor(TOKENS)
    model(ids_T.unsqueeze(0)).logits[0].logsumexp(-1).sum().backward()
    for checkpoint in (False, True):
        decoder.zero_grad()
        hidden_TC = decoder.hidden(ids_T, torch.arange(len(TOKENS)), causal_attend(), checkpoint=checkpoint)
        decoder.logits(hidden_TC).logsumexp(-1).sum().backward()
        for name, parameter in decoder.named_parameters():
            expected = model.get_parameter(name).grad
            torch.testing.assert_close(parameter.grad, expected, atol=1e-4, rtol=1e-4, msg=name)


def test_adjacent_projections_stay_adjacent(hf_folder):
    folder, _ = hf_folder("qwen3")
    decoder = load_decoder(folder)
    ids_T, positions_T = torch.tensor(TOKENS), torch.arange(len(TOKENS))

    def joined(model):
        layer = model.model.layers[2]
        parts = (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj)
        return as_one([part.weight for part in parts]) is not None

    assert joined(decoder)
    assert joined(copy.deepcopy(decoder))
    moved = copy.deepcopy(decoder).double().float()
    assert joined(moved)
    with torch.no_grad():
        expected = decoder.hidden(ids_T, positions_T, causal_attend())
        torch.testing.assert_close(moved.hidden(ids_T, positions_T, causal_attend()), expected, atol=1e-5, rtol=1e-5)


def test_packed_sequences_do_not_see_each_other(hf_folder):
    folder, _ = hf_folder("llama")
    decoder = load_decoder(folder)
    first, second = torch.tensor(TOKENS[:5]), torch.tensor(TOKENS[5:])
    positions = [torch.arange(5), torch.arange(7)]
    with torch.no_grad():
        packed = decoder.hidden(torch.cat([first, second]), torch.cat(positions), causal_attend([5, 7]))
        alone = torch.cat(
            [decoder.hidden(t, p, causal_attend()) for t, p in zip((first, second), positions, strict=True)]
        )
    torch.testing.assert_close(packed, alone, atol=1e-5, rtol=1e-5)


def test_rotation_by_hand():
    # Width 2, one frequency of 1 radian a position: position 1 turns (1, 0) to (cos 1, sin 1).
    cos, sin = rotary_table(2, 2, 10000.0)
    turned = rotate(torch.tensor([[[1.0, 0.0]]]), cos[1:].unsqueeze(1), sin[1:].unsqueeze(1))
    torch.testing.assert_close(turned, torch.tensor([[[0.54030231, 0.84147098]]]))


def test_a_narrow_decoder_turns_by_wide_angles(hf_folder):
    """Angles rounded to bf16 are others than SGLang's and Megatron's. Only the result is rounded here, once."""
    folder, _ = hf_folder("llama", tie_word_embeddings=True)
    decoder = load_decoder(folder, dtype=torch.bfloat16)
    width = decoder.config.head_dim
    keys = []

    def attend(layer, q_NHD, k_NKD, v_NKD):
        keys.append(k_NKD)
        return torch.zeros_like(q_NHD)

    with torch.no_grad():
        token_N = torch.full((200,), 7)
        decoder.hidden(token_N, torch.arange(200), attend)
        unturned = keys[0][0].double()  # of position 0, whose angles are 0
        cos, sin = (table.double().unsqueeze(1) for table in rotary_table(200, width, decoder.config.rope_theta))
        first, second = unturned.chunk(2, dim=-1)
        expected = unturned * cos + torch.cat((-second, first), dim=-1) * sin
    assert keys[0].dtype == torch.bfloat16
    assert float((keys[0].double() - expected).abs().max() / expected.abs().max()) <= 2**-8


def test_grouped_norm_by_hand():
    # Two groups (3, 4) and (6, 8): root mean squares sqrt(12.5) and sqrt(50); plain: sqrt(31.25) for all four.
    x = torch.tensor([3.0, 4.0, 6.0, 8.0])
    grouped = RMSNorm(4, eps=0.0, groups=2)
    with torch.no_grad():
        grouped.weight.copy_(torch.tensor([1.0, 1.0, 2.0, 1.0]))
    torch.testing.assert_close(grouped(x).detach(), torch.tensor([0.848528, 1.131371, 1.697056, 1.131371]))
    torch.testing.assert_close(RMSNorm(4, eps=0.0)(x).detach(), x / 31.25**0.5)


def test_grouped_norm_multiplies_before_it_casts():
    norm = RMSNorm(4, eps=1e-6, groups=2).bfloat16()
    with torch.no_grad():
        norm.weight.fill_(1.0078125)
    x = torch.tensor([1.0, 2.0, 3.0, 5.0], dtype=torch.bfloat16)
    groups = x.float().view(2, 2)
    exact = (groups / groups.pow(2).mean(-1, keepdim=True).add(1e-6).sqrt()).flatten() * 1.0078125
    assert torch.equal(norm(x), exact.bfloat16())


def test_config_reads_both_spellings_of_rope_theta():
    raw = {
        "model_type": "llama",
        "vocab_size": 10,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    assert DecoderConfig.from_hf({**raw, "rope_theta": 5e5}).rope_theta == 5e5
    assert DecoderConfig.from_hf({**raw, "rope_parameters": {"rope_theta": 1e7}}).rope_theta == 1e7
    assert DecoderConfig.from_hf({**raw, "eos_token_id": [1, 7]}).eos_token_ids == (1, 7)
    assert DecoderConfig.from_hf(raw).head_dim == 4


def test_config_refuses_what_is_not_computed_and_says_all_of_it():
    with pytest.raises(ConfigError) as caught:
        DecoderConfig.from_hf(
            {
                "model_type": "gemma9",
                "vocab_size": 10,
                "hidden_size": 8,
                "intermediate_size": 8,
                "num_hidden_layers": 1,
                "num_attention_heads": 3,
                "num_key_value_heads": 2,
                "rope_scaling": {"rope_type": "yarn"},
                "attention_bias": True,
                "hidden_act": "gelu",
            }
        )
    assert len(caught.value.problems) == 5
    assert "gemma9" in str(caught.value)
    with pytest.raises(ConfigError, match="num_hidden_layers is missing"):
        DecoderConfig.from_hf({"model_type": "llama"})
