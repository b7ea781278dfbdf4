"""What the benchmarks' stand-ins of an engine answer to /generate: SGLang's fields around tokens that cost nothing.

Reads of the request what it needs with one search: the stand-in is not what is timed.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

_WANTED = re.compile(rb'"max_new_tokens": ?(\d+)')


def stub_reply(body: bytes, pool: Sequence[int], eos: int) -> tuple[dict[str, Any], int]:
    """(reply, its number of tokens): as many as the request allows, from a random place of `pool`, `eos` last."""
    found = _WANTED.search(body)
    assert found is not None
    count, start = int(found[1]), random.randrange(len(pool))
    ids = [*(pool[(start + i) % len(pool)] for i in range(count - 1)), eos]
    meta = {
        "id": "x",
        "finish_reason": {"type": "stop", "matched": eos},
        "output_token_logprobs": [[-0.5, token, None] for token in ids],
        "prompt_tokens": 0,
        "completion_tokens": count,
        "cached_tokens": 0,
        "weight_version": "0",
    }
    return {"text": "", "output_ids": ids, "meta_info": meta}, count
