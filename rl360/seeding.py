"""Seeds as a pure function of names, so that a rerun, a requeue or a resume draws the same numbers.

In: any mix of strings and integers. Out: an integer below 2**31, which every engine and generator takes. No global
random state is read or written here.
"""

from __future__ import annotations

import hashlib

SEED_BITS = 31  # SGLang's sampling_seed and torch.manual_seed both take it


def seed_from(*parts: str | int) -> int:
    """Hash `parts` to a seed in [0, 2**31). The same parts give the same seed on every machine and Python version."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - SEED_BITS)
