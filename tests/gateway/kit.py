"""What the gateway's tests share: a tiny tokenizer, checkpoint folders around it, attempt specs."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from rl360.gateway.tokenizer import TextTokenizer
from rl360.types import AttemptSpec, Sampling, Task

TEMPLATES = Path(__file__).parent / "chat_templates"
CORPUS = [
    "You are a helpful assistant. user assistant system tool",
    "def solve(x): return x + 1\n```python\nprint('hello world')\n```\n",
    '{"name": "bash", "arguments": {"command": "ls -la"}} exit=0',
    "Today is the day. Let me think about the question and the answer.",
]
SPECIAL = ["<|endoftext|>", "<|begin|>", "<|im_start|>", "<|im_end|>", "<|head|>", "<|endhead|>", "<|eot|>", "</s>"]
SPECIAL += ["[INST]", "[/INST]", "[RESULT]", "[/RESULT]", "[CALLS]", "[TOOLS]", "[/TOOLS]"]
MARKUP = ["<think>", "</think>", "<tool_call>", "</tool_call>"]  # tokens of their own, and part of the text
# Which token ends a turn of the policy under each template.
END_OF_TURN = {
    "chatml": "<|im_end|>",
    "default_system": "<|im_end|>",
    "strips_thinking": "<|im_end|>",
    "always_thinks": "<|im_end|>",
    "dated": "<|eot|>",
    "strict_roles": "</s>",
    "moving_tools": "</s>",
}
THINKING = ("strips_thinking", "always_thinks")
TOOLS = [
    {
        "type": "function",
        "function": {"name": "bash", "parameters": {"type": "object", "properties": {"command": {"type": "string"}}}},
    }
]


@cache
def backend_json() -> str:
    """A byte-level BPE of some 400 tokens, trained on a few lines."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIAL,
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKUP])
    return tokenizer.to_str()


def write_folder(folder: Path, template: str = "chatml") -> Path:
    """A checkpoint folder without weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(backend_json())
    config = {
        "bos_token": "<|begin|>",
        "eos_token": {"content": "<|endoftext|>"},
        "chat_template": (TEMPLATES / f"{template}.jinja").read_text(),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    end = Tokenizer.from_str(backend_json()).token_to_id(END_OF_TURN[template])
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [end, 0]}))
    return folder


def tokenizer_of(template: str = "chatml") -> TextTokenizer:
    backend = Tokenizer.from_str(backend_json())
    end = backend.token_to_id(END_OF_TURN[template])
    names = {"bos_token": "<|begin|>", "eos_token": "</s>" if END_OF_TURN[template] == "</s>" else "<|endoftext|>"}
    return TextTokenizer(backend, names, frozenset([end, 0]), (TEMPLATES / f"{template}.jinja").read_text())


def attempt_spec(name: str = "a0", seed: int = 7, **sampling: object) -> AttemptSpec:
    task = Task("task", Path("task"), ("coding",), "hash")
    values = {"max_new_tokens": 64, "max_context_tokens": 100_000, "max_turns": 100, **sampling}
    return AttemptSpec(name, "g0", 0, task, Sampling(**values), seed)  # type: ignore[arg-type]
