"""How fast the engines sample, so that a policy's long answers are told apart from an engine that lets it wait.

In: each finished generation's tokens and seconds. Out: the seconds of it that sampling those tokens takes anyway; the
rest was a queue or a pause. Left to others: adding up (session.py), what counts as whose (rl360.rollout.failures).

An engine does not say what a request waited for, so the pace is that of the fastest tenth of the recent generations:
those that hardly queued, at the load of now. It is never taken to be more than a few times slower than it was at its
best: an engine in trouble must not turn its delays into the policy's. Before enough is known, all of it is waiting.
"""

from __future__ import annotations

from collections import deque

WINDOW = 256  # generations: a few minutes of a busy proxy
MIN_KNOWN = 8  # generations before the pace is known
MIN_TOKENS = 16  # of a generation that tells a pace: a shorter one is mostly its prompt and the way there and back
FASTEST_SHARE = 0.1
MOST_SLOWDOWN = 5.0  # a full batch decodes a few times slower than a single request; what is slower still is trouble


class Pace:
    """Seconds a token, over all sessions of one proxy."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=WINDOW)
        self._best = float("inf")

    def add(self, num_tokens: int, seconds: float) -> None:
        """Learn from one finished generation."""
        if num_tokens >= MIN_TOKENS:
            self._recent.append(seconds / num_tokens)
            if len(self._recent) >= MIN_KNOWN:
                self._best = min(self._best, self._fast())

    def sampling_s(self, num_tokens: int, seconds: float) -> float:
        """Of the `seconds` that a generation took, those that sampling its tokens takes."""
        if len(self._recent) < MIN_KNOWN:
            return 0.0
        return min(seconds, num_tokens * min(self._fast(), MOST_SLOWDOWN * self._best))

    def _fast(self) -> float:
        return sorted(self._recent)[int(FASTEST_SHARE * len(self._recent))]
