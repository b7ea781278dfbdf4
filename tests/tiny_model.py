"""A tiny random Llama as a complete Hugging Face folder, for tests that need a model but not a good one.

In: a folder and a seed. Out: what rl360.models.tiny writes; the other families are there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rl360.models.tiny import FAMILIES, write_tiny

SPECIAL_TOKENS = FAMILIES["llama"].special_tokens
ENDOFTEXT_ID, IM_START_ID, IM_END_ID = 0, 1, 2


def write_tiny_llama(folder: Path, **numbers: Any) -> Path:
    """The llama of `write_tiny`: seed, hidden, layers, heads, kv_heads, ffn, tied, max_positions, weights."""
    return write_tiny(folder, "llama", **numbers)
