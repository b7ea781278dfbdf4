"""Is it the chosen model? Differences are named with their file; and a further model is one YAML."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rl360.config import locate
from rl360.config.check import examine
from rl360.config.compose import Request, compose
from rl360.errors import ConfigError
from rl360.models.architecture import DecoderConfig
from rl360.models.catalogue import shipped_model
from rl360.models.inspection import checkpoint_differences, num_parameters
from rl360.models.loading import read_config
from rl360.models.tiny import write_tiny


def change(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.mark.parametrize("name", ["k2_horizon_7b", "qwen3_8b", "smollm2_135m"])
def test_the_shipped_expectations_are_of_one_mind(name):
    """The parameters that the shapes give are the published number: no key is mistyped."""
    expect = shipped_model(name)["expect"]
    assert num_parameters(DecoderConfig.from_hf(expect)) == expect["num_parameters"]


def test_every_different_key_is_named(tmp_path):
    folder = write_tiny(tmp_path / "m", "k2_horizon")
    expect = {"model_type": "k2_horizon", "hidden_size": 64, "layernorm_num_groups": 8, "rope_theta": 1e6, "extra": 1}
    where = folder / "config.json"
    assert checkpoint_differences(folder, expect) == [
        f"{where}: hidden_size is 48; expected 64",
        f"{where}: layernorm_num_groups is 4; expected 8",
        f"{where}: rope_theta is 10000000.0; expected 1000000.0",
        f"{where}: extra is null; expected 1",
    ]


def test_numbers_compare_as_numbers_and_what_is_implied_counts(tmp_path):
    folder = write_tiny(tmp_path / "m", "llama")
    raw = json.loads((folder / "config.json").read_text())
    del raw["head_dim"], raw["rope_theta"]
    (folder / "config.json").write_text(json.dumps(raw))
    expect = {"head_dim": 8, "rope_theta": 10000, "rms_norm_eps": 0.00001, "sliding_window": None}
    assert checkpoint_differences(folder, expect) == []


def test_the_number_of_parameters(tmp_path):
    folder = write_tiny(tmp_path / "m", "qwen3")
    found = sum(tensor.numel() for tensor in load_file(folder / "model.safetensors").values())
    assert checkpoint_differences(folder, {"num_parameters": found}) == []
    (problem,) = checkpoint_differences(folder, {"num_parameters": found + 1})
    assert problem == f"{folder / 'config.json'}: gives a model of {found:,} parameters; expected {found + 1:,}"


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), "model.layers.1.mlp.up_proj.weight is in no file"),
        (lambda t: t.update({"model.layers.7.x": torch.ones(1)}), "tensor model.layers.7.x is not in a llama"),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(3)}),
            "model.norm.weight has shape [3], config.json gives",
        ),
    ],
)
def test_the_first_wrong_tensor_and_its_file(tmp_path, damage, said):
    folder = write_tiny(tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    damage(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (problem,) = checkpoint_differences(folder)
    assert said in problem
    assert str(folder) in problem
    assert checkpoint_differences(folder, weights=False) == []


def test_half_precision_headers_are_read_too(tmp_path):
    folder = write_tiny(tmp_path / "m")
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert checkpoint_differences(folder) == []


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"num_experts": 8}, "num_experts is 8"),
        ({"mova_num_experts": 4}, "mova_num_experts is 4"),
        ({"query_key_norm": True}, "query_key_norm is true"),
        ({"attention_gate_func": "softplus"}, 'attention_gate_func is "softplus"'),
        ({"rope_head_dim": 4}, "rope_head_dim 4 of head_dim 8"),
        ({"embedding_multiplier": 2.0}, "embedding_multiplier is 2.0"),
        ({"rope_theta": 1e6}, "rope_theta is 1e+06, rope_parameters say 1e+07"),
        ({"rope_theta": None, "rope_parameters": None}, "no rope_theta"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e7}}, "rope type 'yarn'"),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "rope type 'linear'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5; whole heads"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}},
            "partial_rotary_factor 0.25",
        ),
        ({"layernorm_num_groups": 5}, "does not divide into 5 norm groups"),
        ({"layernorm_num_groups": None}, "no layernorm_num_groups"),  # one group would be other numbers, unnoticed
    ],
)
def test_sisters_of_k2_horizon_that_are_not_computed_are_refused(tmp_path, values, said):
    folder = write_tiny(tmp_path / "m", "k2_horizon")
    change(folder, **values)
    (problem,) = checkpoint_differences(folder)
    assert said in problem
    assert str(folder / "config.json") in problem


@pytest.mark.parametrize(
    "values",
    [
        {"attention_gate_func": "none"},
        {"embedding_multiplier": 1.0},
        {"num_experts": 0},
        {"partial_rotary_factor": 1.0, "rope_scaling": None},
    ],
)
def test_switches_that_are_off_are_no_matter(tmp_path, values):
    folder = write_tiny(tmp_path / "m", "k2_horizon")
    change(folder, **values)
    assert checkpoint_differences(folder) == []


@pytest.mark.parametrize(
    ("key", "most"), [("num_hidden_layers", "10,000"), ("vocab_size", "2,147,483,647"), ("head_dim", "2,147,483,647")]
)
def test_numbers_beyond_all_reason_are_refused_and_not_computed_with(tmp_path, key, most):
    folder = write_tiny(tmp_path / "m")
    change(folder, **{key: 10**30})
    (problem,) = checkpoint_differences(folder)
    assert problem.endswith(f"{key} is {10**30:,}; expected at most {most}")


def test_missing_and_unreadable_configs(tmp_path):
    assert checkpoint_differences(tmp_path) == [
        f"{tmp_path / 'config.json'}: not found; expected a Hugging Face model folder"
    ]
    (tmp_path / "config.json").write_text("[]")
    assert "a list; expected a JSON object" in checkpoint_differences(tmp_path)[0]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"num_attention_heads": "six"}, 'num_attention_heads is "six"; expected a whole number'),
        ({"hidden_size": -48}, "hidden_size is -48; expected a whole number"),
        ({"hidden_size": 0}, "hidden_size is missing"),
        ({"head_dim": 8.5}, "head_dim is 8.5; expected a whole number"),
        ({"rope_theta": "1e7"}, 'rope_theta is "1e7"; expected a number'),
        ({"rope_parameters": {"rope_theta": "1e7"}}, 'rope_parameters: rope_theta is "1e7"; expected a number'),
        ({"rope_scaling": "linear"}, 'rope_scaling is "linear"; expected an object'),
        ({"partial_rotary_factor": [0.5]}, "partial_rotary_factor [0.5]; whole heads are rotated"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is NaN; expected a number"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0; expected more than 0"),
        ({"max_position_embeddings": 0}, "max_position_embeddings is 0; expected more than 0"),
        ({"initializer_range": -0.02}, "initializer_range is -0.02; expected 0 or more"),
        ({"tie_word_embeddings": "false"}, 'tie_word_embeddings is "false"; expected true or false'),
    ],
)
def test_a_config_with_something_else_for_a_number_is_named(tmp_path, values, said):
    folder = write_tiny(tmp_path / "m", "k2_horizon")
    change(folder, **values)
    (problem,) = checkpoint_differences(folder, {"rope_theta": 1e7, "head_dim": 8} if "theta" in said else None)
    assert said in problem
    with pytest.raises(ConfigError, match=re.escape(said)):
        read_config(folder)


def test_a_tensor_in_two_files_is_refused(tmp_path):
    """The index names one of them, and readers that load file by file would take the other."""
    folder = write_tiny(tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    save_file(tensors, folder / "a.safetensors", metadata={"format": "pt"})
    patched = {"model.norm.weight": 2 * tensors["model.norm.weight"]}
    save_file(patched, folder / "b.safetensors", metadata={"format": "pt"})
    weight_map = dict.fromkeys(tensors, "a.safetensors") | {"model.norm.weight": "b.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert checkpoint_differences(folder) == [
        f"{folder / 'b.safetensors'}: tensor model.norm.weight is in a.safetensors too; expected it in one file"
    ]


def model_problems(tmp_path: Path, *overrides: str) -> list[str]:
    places = (f"paths.models={tmp_path}", f"paths.outputs={tmp_path / 'out'}", f"paths.cache={tmp_path / 'cache'}")
    composed = compose(Request(("experiment=quickstart", *places, *overrides)))
    assert composed.problems == ()
    return [problem for problem in examine(composed).problems if problem.startswith("model")]


def test_a_model_without_heads_is_a_problem_and_no_bug(tmp_path):
    folder = write_tiny(tmp_path / "other")
    change(folder, num_attention_heads=0, head_dim=None)
    (problem,) = model_problems(tmp_path, f"model.path={folder}", "model.expect=null")
    assert "num_attention_heads is missing" in problem


def test_check_names_the_first_difference_and_the_way_out(tmp_path):
    folder = write_tiny(tmp_path / "other")
    (problem,) = model_problems(tmp_path, f"model.path={folder}")
    assert problem == (
        f"model.path: {folder / 'config.json'}: hidden_size is 48; expected 576 of smollm2_135m, and 6 more keys "
        "differ; choose the model that it is, or take any with model.expect=null"
    )
    assert model_problems(tmp_path, f"model.path={folder}", "model.expect=null") == []


def test_check_says_how_a_tiny_model_is_made(tmp_path):
    (problem,) = model_problems(tmp_path, "model=tiny_k2_horizon")
    assert problem.endswith("try: rl360 model tiny --family k2_horizon")
    write_tiny(tmp_path / "tiny_k2_horizon", "k2_horizon")
    assert model_problems(tmp_path, "model=tiny_k2_horizon") == []
    write_tiny(tmp_path / "tiny_qwen3", "llama")
    assert 'model_type is "llama"; expected "qwen3" of tiny_qwen3' in model_problems(tmp_path, "model=tiny_qwen3")[0]


def test_the_question_needs_no_torch(tmp_path):
    folder = write_tiny(tmp_path / "m")
    code = (
        "import sys; from rl360.models.inspection import checkpoint_differences\n"
        "assert checkpoint_differences(sys.argv[1]) == []; assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True)


def test_a_further_model_is_one_yaml(tmp_path, monkeypatch):
    """A Llama that nobody here has heard of: its file alone makes `check`, `fetch` and the loader know it."""
    import shutil

    from rl360.models import fetch as fetching
    from rl360.models.decoder import causal_attend
    from rl360.models.loading import load_decoder

    conf = tmp_path / "conf"
    shutil.copytree(locate.conf_folder(), conf)
    (conf / "model" / "newcomer.yaml").write_text(
        "# A newcomer.\nname: newcomer\nsource: someone/Newcomer\nrevision: abc123\nmax_context_tokens: 4096\n"
        "tool_parser: hermes\nexpect:\n  model_type: llama\n  hidden_size: 96\n  num_hidden_layers: 3\n"
    )
    for module in ("rl360.config.compose", "rl360.models.catalogue"):
        monkeypatch.setattr(f"{module}.conf_folder", lambda: conf)

    def hub(hub_id: str, revision: str | None, folder: Path, progress: Any) -> dict[str, str | None]:
        assert (hub_id, revision) == ("someone/Newcomer", "abc123")
        write_tiny(folder, "llama", hidden=96, heads=12, kv_heads=4, layers=3)
        return {"source": hub_id, "revision": revision}

    monkeypatch.setattr(fetching, "_from_hub", hub)
    models = tmp_path / "models"
    assert "try: rl360 model fetch newcomer" in model_problems(models, "model=newcomer")[0]
    folder = fetching.fetch("newcomer", models / "newcomer")
    assert model_problems(models, "model=newcomer") == []
    decoder = load_decoder(folder)
    with torch.no_grad():
        hidden = decoder.hidden(torch.tensor([5, 6, 7]), torch.arange(3), causal_attend())
    assert decoder.logits(hidden).isfinite().all()
    change(folder, num_hidden_layers=2)
    assert "num_hidden_layers is 2; expected 3 of newcomer" in model_problems(models, "model=newcomer")[0]


def test_a_tiny_name_is_made_not_fetched(tmp_path):
    from rl360.models.fetch import fetch

    with pytest.raises(ConfigError, match="made, not fetched; try: rl360 model tiny --family qwen3"):
        fetch("tiny_qwen3", tmp_path / "m")


def test_null_means_what_an_absent_key_means(tmp_path):
    folder = write_tiny(tmp_path / "m", "llama")
    change(folder, rms_norm_eps=None, max_position_embeddings=None, initializer_range=None, tie_word_embeddings=None)
    raw = json.loads((folder / "config.json").read_text())
    config = DecoderConfig.from_hf(raw)
    assert config == DecoderConfig.from_hf({key: value for key, value in raw.items() if value is not None})
    assert (config.rms_norm_eps, config.max_positions, config.initializer_range) == (1e-6, 2048, 0.02)
