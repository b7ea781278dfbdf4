"""Whose end it is when something fails while an agent acts on a reply: the policy's, or the sandbox's.

In: a Harbor environment, and what went wrong. Out: whether the sandbox still answers. Left to others: what follows from
it (the agents), and what the end of an attempt means for training (the rollout's failure table).

The policy chooses its replies and can change every file of its sandbox, so it must not be able to choose that its
attempt is taken for one that failed under it. What fails in a sandbox that answers is the policy's.
"""

from __future__ import annotations

from harbor.environments.base import BaseEnvironment

_TIMEOUT_S = 10


def timed_out(error: Exception) -> bool:
    """Whether the environment ended a command because its time was up."""
    return isinstance(error, RuntimeError) and "timed out" in str(error)


async def sandbox_answers(environment: BaseEnvironment) -> bool:
    """Whether a command comes back, with whatever exit code: the policy may have broken the shell that runs it."""
    for user in (None, "root"):  # it may also have removed its own user
        try:
            await environment.exec("true", user=user, timeout_sec=_TIMEOUT_S)
        except Exception as error:
            if timed_out(error):
                return True
        else:
            return True
    return False


def printable(text: str) -> str:
    """The text with a question mark for each lone surrogate: JSON can write one, and nothing can encode it."""
    return text.encode("utf-8", "replace").decode()


def small_integer(text: str, max_digits: int = 9) -> int | None:
    """A decimal number of ASCII digits, or None."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= max_digits else None
