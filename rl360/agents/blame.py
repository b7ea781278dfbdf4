"""Whose end it is when something fails while an agent acts on a reply: the policy's, the sandbox's, or this host's.

In: a Harbor environment, and what went wrong. Out: whether the sandbox still answers, whether the host is at its end.
Left to others: what follows from it (the agents), and what the end of an attempt means for training (the rollout's
failure table).

The policy chooses its replies and can change every file of its sandbox, so it must not be able to choose that its
attempt is taken for one that failed under it. What fails in a sandbox that answers is the policy's.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator

from harbor.environments.base import BaseEnvironment

_TIMEOUT_S = 10
# What the operating system says when a machine, and not a path or a command that the policy chose, is at its end.
_HOST_ERRNOS = frozenset({
    errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EIO, errno.EROFS,
})  # fmt: skip


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


def hosts_failure(error: BaseException, environment: object) -> bool:
    """Whether this machine ran out of something or broke, and no limit of the sandbox was reached.

    Only what was raised counts: what a program printed of a full disk is text, and a policy can print anything.
    """
    if getattr(environment, "exhausted", ""):  # our sandboxes say so; a transfer into a full one fails as a disk does
        return False
    return any(
        isinstance(one, MemoryError) or (isinstance(one, OSError) and one.errno in _HOST_ERRNOS)
        for one in chain_of(error)
    )


def chain_of(error: BaseException) -> Iterator[BaseException]:
    """The error, what it was raised from or while handling, and the members of groups; each once."""
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        one = left.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        left += [one.__cause__, None if one.__suppress_context__ else one.__context__]
        if isinstance(one, BaseExceptionGroup):
            left += one.exceptions


def printable(text: str) -> str:
    """The text with a question mark for each lone surrogate: JSON can write one, and nothing can encode it."""
    return text.encode("utf-8", "replace").decode()


def small_integer(text: str, max_digits: int = 9) -> int | None:
    """A decimal number of ASCII digits, or None."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= max_digits else None
