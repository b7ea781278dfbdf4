"""Tiny models of each family: the same bytes again, the family's arithmetic, the family's dialect."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rl360.errors import ConfigError
from rl360.gateway.parsers import make_parser
from rl360.models.architecture import DecoderConfig
from rl360.models.catalogue import shipped_model
from rl360.models.decoder import causal_attend
from rl360.models.inspection import checkpoint_differences
from rl360.models.loading import load_decoder
from rl360.models.tiny import FAMILIES, main, write_tiny

TOOL = {
    "type": "function",
    "function": {"name": "run", "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}}},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_seed_is_a_model(family, tmp_path):
    one, same, other = (write_tiny(tmp_path / name, family, seed=seed) for name, seed in (("a", 1), ("b", 1), ("c", 2)))
    names = sorted(path.name for path in one.iterdir())
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= set(names)
    assert all((one / name).read_bytes() == (same / name).read_bytes() for name in names)
    different = [name for name in names if (one / name).read_bytes() != (other / name).read_bytes()]
    assert different == ["model.safetensors"]


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_computes_the_same(family, tmp_path):
    from transformers import AutoModelForCausalLM

    from rl360.models.k2_horizon_hf import register

    register()
    folder = write_tiny(tmp_path / family, family, seed=5, layers=3)
    decoder, model = load_decoder(folder), AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids_T = torch.tensor([9, 100, 31, 4, 77, 250, 12, 60])
    with torch.no_grad():
        logits_TV = decoder.logits(decoder.hidden(ids_T, torch.arange(len(ids_T)), causal_attend()))
        torch.testing.assert_close(logits_TV, model(ids_T[None]).logits[0], atol=5e-5, rtol=5e-5)
    # Far from uniform, and not the last token again: a comparison that could not fail would be worth nothing.
    assert logits_TV.std() > 0.5
    assert (logits_TV.argmax(-1) != ids_T).any()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_shipped_yaml_fits(family, tmp_path):
    folder = write_tiny(tmp_path / family, family)
    assert checkpoint_differences(folder, shipped_model(f"tiny_{family}")["expect"]) == []
    raw = json.loads((folder / "config.json").read_text())
    assert raw["architectures"] == [FAMILIES[family].architecture]
    config = DecoderConfig.from_hf(raw)
    assert config.qk_norm is (family == "qwen3")
    assert config.norm_groups == (4 if family == "k2_horizon" else 1)
    assert config.tie_word_embeddings is (family == "llama")


def rendered(folder: Path, messages: list[dict[str, Any]], **options: Any) -> str:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    options.setdefault("add_generation_prompt", True)
    text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    assert isinstance(text, str)
    return text


def call(arguments: Any) -> dict[str, Any]:
    return {"type": "function", "id": "1", "function": {"name": "run", "arguments": arguments}}


ASKED = [{"role": "user", "content": "Do it."}]


@pytest.mark.parametrize("family", ["qwen3", "k2_horizon"])
def test_a_turn_of_the_family_is_read_by_its_parsers(family, tmp_path):
    """What the template writes of a turn is what the policy would have written; the parsers give the message back."""
    folder = write_tiny(tmp_path / family, family, weights=False)
    chosen = shipped_model(f"tiny_{family}")
    prompt = rendered(folder, ASKED, tools=[TOOL])
    turn = {"role": "assistant", "content": "Yes.", "reasoning_content": "why\n", "tool_calls": [call({"n": 3})]}
    whole = rendered(folder, [*ASKED, turn], tools=[TOOL], add_generation_prompt=False)
    assert whole.startswith(prompt)
    text = whole[len(prompt) :].rstrip("\n").removesuffix(FAMILIES[family].eos[-1])
    parsed = make_parser(chosen["tool_parser"], chosen["reasoning_parser"]).parse(text, prompt, [TOOL])
    assert (parsed.reasoning, parsed.content) == ("why", "Yes.")
    assert [(c.name, json.loads(c.arguments)) for c in parsed.calls] == [("run", {"n": 3})]


def test_past_thinking_is_dropped_by_qwen3_and_kept_by_k2_horizon(tmp_path):
    turn = {"role": "assistant", "content": "Yes.", "reasoning_content": "because"}
    history = [*ASKED, turn, {"role": "user", "content": "Again."}]
    qwen = write_tiny(tmp_path / "q", "qwen3", weights=False)
    k2 = write_tiny(tmp_path / "k", "k2_horizon", weights=False)
    assert "because" not in rendered(qwen, history)
    assert "because" in rendered(qwen, history[:2], add_generation_prompt=False)
    assert "<ifm|think>\nbecause</ifm|think>Yes.<|ifm|im_end|>" in rendered(k2, history)
    assert rendered(k2, history).startswith(rendered(k2, history[:2], add_generation_prompt=False))


def test_k2_horizons_template_is_strict_and_opens_the_reasoning(tmp_path):
    folder = write_tiny(tmp_path / "k", "k2_horizon", weights=False)
    assert rendered(folder, ASKED).startswith("<|ifm|begin_of_text|><|ifm|im_start|>user\nDo it.<|ifm|im_end|>")
    assert rendered(folder, ASKED).endswith("<|ifm|im_start|>assistant\n<ifm|think>\n")
    with pytest.raises(Exception, match="needs reasoning_content"):
        rendered(folder, [*ASKED, {"role": "assistant", "content": "Yes."}])
    turn = {"role": "assistant", "content": "", "reasoning_content": "", "tool_calls": [call('{"n": 3}')]}
    with pytest.raises(Exception, match="arguments must be an object"):
        rendered(folder, [*ASKED, turn])


def test_markup_is_one_token_that_stays_in_the_text(tmp_path):
    from rl360.gateway.tokenizer import TextTokenizer

    tokenizer = TextTokenizer.from_folder(write_tiny(tmp_path / "k", "k2_horizon", weights=False))
    for tag in FAMILIES["k2_horizon"].markup:
        assert len(tokenizer.encode(tag)) == 1
    text = "<ifm|tool_call>run\n</ifm|tool_call>"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert [tokenizer.id_of(token) for token in FAMILIES["k2_horizon"].special_tokens] == [0, 1, 2, 3]


def test_numbers_that_do_not_fit_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="'gemma'; expected one of llama, qwen3, k2_horizon"):
        write_tiny(tmp_path / "m", "gemma")
    with pytest.raises(ConfigError, match="50 does not divide into 4 norm groups"):
        write_tiny(tmp_path / "m", "k2_horizon", hidden=50, heads=5, kv_heads=5)
    with pytest.raises(ConfigError) as caught:
        main(["--out", str(tmp_path / "m"), "--family", "llama", "--heads", "0", "--layers", "-1", "--head-dim", "0"])
    assert list(caught.value.problems) == [
        f"{name}; expected at least 1" for name in ("layers: -1", "heads: 0", "head_dim: 0")
    ]
    assert not (tmp_path / "m").exists()  # or the next try would be told that it is there already


def test_a_replacement_that_cannot_be_made_costs_nothing(tmp_path):
    folder = write_tiny(tmp_path / "mine", "qwen3")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    (tmp_path / "link").symlink_to("mine")
    for numbers in (["--heads", "0"], ["--heads", "5", "--kv-heads", "2"], ["--seed", "-1"], ["--hidden", "3"]):
        with pytest.raises(ConfigError):
            main(["--out", str(folder), "--force", *numbers])
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert main(["--out", str(tmp_path / "link"), "--force", "--family", "k2_horizon"]) == 0
    assert (tmp_path / "link").is_symlink()
    assert json.loads((folder / "config.json").read_text())["model_type"] == "k2_horizon"
    assert sorted(path.name for path in tmp_path.iterdir()) == [".mine.lock", "link", "mine"]


def test_heads_that_cannot_be_rotated_are_refused(tmp_path):
    for numbers, width in (({"hidden": 3}, 0), ({"head_dim": 7}, 7)):
        with pytest.raises(ConfigError, match=f"heads of {width} values; they are rotated in pairs"):
            write_tiny(tmp_path / "m", "llama", **numbers)
    assert not (tmp_path / "m").exists()


def test_the_command(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("RL360_MODELS", str(tmp_path))
    numbers = ["--hidden", "64", "--heads", "4", "--kv-heads", "2", "--layers", "1", "--max-positions", "128"]
    assert main(["--family", "qwen3", *numbers]) == 0
    assert "rl360 check model=tiny_qwen3" in capsys.readouterr().out
    raw = json.loads((tmp_path / "tiny_qwen3" / "config.json").read_text())
    assert (raw["hidden_size"], raw["num_hidden_layers"], raw["max_position_embeddings"]) == (64, 1, 128)
    with pytest.raises(ConfigError, match="is there already"):
        main(["--family", "qwen3"])
    assert main(["--family", "qwen3", "--force"]) == 0
    assert json.loads((tmp_path / "tiny_qwen3" / "config.json").read_text())["hidden_size"] == 48
    (tmp_path / "mine").mkdir()
    with pytest.raises(ConfigError, match="holds no model"):
        main(["--out", str(tmp_path / "mine"), "--force"])
