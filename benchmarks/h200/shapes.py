"""An HF folder of a shape without weights: config.json for random weights, and the tokenizer of another model.

python benchmarks/h200/shapes.py qwen3_8b TOKENIZER_FOLDER FOLDER [LAYERS]
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

SHAPES = {
    "qwen3_8b": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 12288,
        "max_position_embeddings": 40960,
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": 151936,
    },
}
SHAPES["k2_horizon_7b"] = SHAPES["qwen3_8b"] | {
    "architectures": ["K2HorizonForCausalLM"],
    "layernorm_num_groups": 4,
    "max_position_embeddings": 524288,
    "model_type": "k2_horizon",
    "rope_theta": 1e7,
    "vocab_size": 250624,
}
# As wide as a test can compute; the vocabulary stays, which is larger than the tokenizer's.
SHAPES["qwen3_narrow"] = SHAPES["qwen3_8b"] | {
    "head_dim": 16,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "torch_dtype": "float32",
}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


def main(name: str, tokenizer: str, folder: str, layers: str | None = None) -> None:
    shape = SHAPES[name] | ({} if layers is None else {"num_hidden_layers": int(layers)})
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    (target / "config.json").write_text(json.dumps(shape, indent=1) + "\n")
    for file in TOKENIZER_FILES:
        if (Path(tokenizer) / file).is_file():
            shutil.copyfile(Path(tokenizer) / file, target / file)


if __name__ == "__main__":
    main(*sys.argv[1:])
