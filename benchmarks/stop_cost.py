"""Milliseconds of SGLang's scheduler for one answer, looking for a closed code block after each token, or for a string.

    python benchmarks/stop_cost.py [--model models/smollm2_135m] [--tokens 96 256 1024 4096]

What SGLang 0.5.16 does in `Req.update_finish_state`, repeated with its tokenizer class: the end of the answer is
decoded, as many tokens as the longest match has characters (no bound: all of it), and searched; for strings as many as
they have tokens, and one. The text is prose without a fence, so that nothing ends.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

from transformers import AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rl360.gateway.generation import CODE_BLOCK_REGEX, FENCE, FENCE_STOPS

TEXT = "The function takes a list of numbers and returns the largest of them, or nothing where the list is empty. "


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("models/smollm2_135m"))
    parser.add_argument("--tokens", type=int, nargs="+", default=[96, 256, 1024, 4096])
    asked = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(asked.model)
    text = TEXT * (max(asked.tokens) // 16 + 1)
    ids = tokenizer.encode(text, add_special_tokens=False)[: max(asked.tokens)]
    tail = 1 + max(len(tokenizer.encode(stop, add_special_tokens=False)) for stop in FENCE_STOPS)
    print("| tokens of an answer | expression, ms | string, ms |\n|---|---|---|")
    for length in asked.tokens:
        expression = best(lambda end: re.search(CODE_BLOCK_REGEX, str(tokenizer.decode(ids[:end]))), length)
        string = best(lambda end: FENCE in tokenizer.decode(ids[max(0, end - tail) : end]), length)
        print(f"| {length} | {expression:.1f} | {string:.1f} |", flush=True)


def best(look: Callable[[int], object], length: int, repeats: int = 3) -> float:
    """Milliseconds for all tokens of an answer, of the fastest repeat."""
    found = []
    for _ in range(repeats):
        began = time.perf_counter()
        for end in range(1, length + 1):
            look(end)
        found.append(time.perf_counter() - began)
    return 1000 * min(found)


if __name__ == "__main__":
    main()
