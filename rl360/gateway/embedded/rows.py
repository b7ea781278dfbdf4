"""The rows of the running requests: who has which one, and what of its cache is taken over from others.

In: requests that join and leave. Out: `requests`, whose index is the row; decoding ones come first, which is the order
that a step needs. Left to others: when a request joins (engine.py), the memory (kv_cache.py). Used under the engine's
lock.
"""

from __future__ import annotations

from rl360.gateway.embedded.kv_cache import MIN_SHARED_TOKENS, KVCache, shared_prefix
from rl360.gateway.embedded.request import Request


class Rows:
    """`reuses`: keys and values of an equal beginning are copied from other requests and from the cache's memory."""

    def __init__(self, cache: KVCache, reuses: bool) -> None:
        self.requests: list[Request] = []  # always this list object; the engine looks at it
        self._cache = cache
        self._reuses = reuses

    def follows_a_prefill(self, request: Request) -> bool:
        """Whether more of this request's beginning is being computed for another than is there already."""
        if not self._reuses:
            return False
        tokens = request.tokens[: request.length]
        for other in self.requests:
            if not other.decoding:
                shared = shared_prefix(other.tokens[: other.length], tokens)
                if shared >= other.computed + MIN_SHARED_TOKENS:
                    return True
        return False

    def join(self, request: Request) -> None:
        """Give it the next row, which the cache has reserved."""
        row = len(self.requests)
        reused = self._reuse(request, row) if self._reuses else 0
        request.computed = reused
        if not request.started:
            request.started = True
            request.cached_tokens = reused
        self.requests.append(request)
        front = sum(r.decoding for r in self.requests[:row])
        if request.decoding and front < row:  # decoding rows stay in front of those still in their prompt
            other = self.requests[front]
            self._cache.swap_rows(front, row, max(other.computed, request.computed))
            self.requests[front], self.requests[row] = request, other

    def _reuse(self, request: Request, row: int) -> int:
        """Copy the longest known beginning into the row. Returns its length; the last token is always computed."""
        tokens = request.tokens[: request.length - 1]
        source, shared = None, 0
        for index, other in enumerate(self.requests):
            size = shared_prefix(other.tokens[: other.computed], tokens)
            if size > shared:
                source, shared = index, size
        kept, kept_size = self._cache.find(tokens)
        if max(shared, kept_size) < MIN_SHARED_TOKENS:
            return 0
        if kept is not None and kept_size > shared:
            self._cache.restore(kept, row, kept_size)
            return kept_size
        assert source is not None
        self._cache.copy_row(source, row, shared)
        return shared

    def next_spans(self, prefill_tokens: int) -> tuple[int, list[tuple[int, int]]]:
        """(decoding rows, tokens [start, end) of each row that takes part in a step): the next token of every decoding
        row, then at most `prefill_tokens` of prompts, those that came first before others."""
        decoding = sum(r.decoding for r in self.requests)
        spans = [(r.computed, r.length) for r in self.requests[:decoding]]
        for request in self.requests[decoding:]:
            if prefill_tokens <= 0:
                break
            end = min(request.length, request.computed + prefill_tokens)
            spans.append((request.computed, end))
            prefill_tokens -= end - request.computed
        return decoding, spans

    def leave(self, rows: list[int]) -> None:
        """Take rows out; the last decoding row, and then the last row of all, fill the gap."""
        for row in sorted(rows, reverse=True):
            last_decoding = sum(r.decoding for r in self.requests) - 1
            gaps = [row] if row >= last_decoding else [row, last_decoding]
            for gap, filler in zip(gaps, [*gaps[1:], len(self.requests) - 1], strict=True):
                self._cache.copy_row(filler, gap, self.requests[filler].computed)
                self.requests[gap] = self.requests[filler]
            self.requests.pop()

    def retract_all(self) -> list[Request]:
        """Take every request out; what it has in the cache counts no more. Returns them in their order."""
        retracted = self.requests.copy()
        self.requests.clear()
        for request in retracted:
            request.computed = 0
            request.retractions += 1
        return retracted
