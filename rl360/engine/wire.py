"""The bytes between a driver and one of its worker processes.

In: a call's arguments, its result or its exception. Out: length-prefixed frames for a stream socket, and the same
objects on the other side. Left to others: sockets, processes and what the calls mean (workers.py, worker_main.py).

A frame is a 17 byte header (payload length u64, call id u64, kind u8, little-endian) and a pickled payload. Both ends
are processes of one run and one code version, so pickle is safe here; the socket is a private pair and never listens.
"""

from __future__ import annotations

import asyncio
import pickle
import struct
import traceback
from collections.abc import Iterator
from enum import IntEnum

from rl360.errors import RL360Error

_HEADER = struct.Struct("<QQB")
START_CALL_ID = 0  # the reply to START; calls count from 1


class Kind(IntEnum):
    """What a frame is. The first three go to the worker, the last two come back."""

    START = 0  # payload: (target, kwargs, rank, sys_path)
    CALL = 1  # payload: (method, args)
    CANCEL = 2  # payload: None; the call's task is cancelled, and no reply is awaited
    CLOSE = 3  # payload: grace_s
    RESULT = 4  # payload: the return value
    ERROR = 5  # payload: (text, pickled exception or None)


def frame(kind: Kind, call_id: int, payload: bytes) -> bytes:
    """Put the header before a pickled payload."""
    return _HEADER.pack(len(payload), call_id, kind) + payload


class FrameReader:
    """Cuts a byte stream into frames, whatever the chunks are."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, chunk: bytes) -> Iterator[tuple[Kind, int, bytes]]:
        """Add bytes; yield each frame (kind, call id, payload) that is complete now."""
        self._buffer += chunk
        while len(self._buffer) >= _HEADER.size:
            length, call_id, kind = _HEADER.unpack_from(self._buffer)
            end = _HEADER.size + length
            if len(self._buffer) < end:
                return
            payload = bytes(memoryview(self._buffer)[_HEADER.size : end])
            del self._buffer[:end]
            yield Kind(kind), call_id, payload


def _same(left: BaseException, right: BaseException) -> bool:
    return type(left) is type(right) and str(left) == str(right) and left.__dict__ == right.__dict__


def _rebuild(cls: type[BaseException], args: tuple[object, ...], state: dict[str, object]) -> BaseException:
    # Without __init__: one that composes its message (InfrastructureError) would get the message as its argument.
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class _Rebuilt:
    """Pickles as a call of _rebuild, for exceptions that do not survive pickle's own way."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self._error), self._error.args, dict(self._error.__dict__))


def dump_error(error: BaseException, where: str) -> bytes:
    """Payload of an ERROR frame. The exception itself goes along when it comes back equal, its text always."""
    text = f"{where}: {''.join(traceback.format_exception(error)).rstrip()}"
    packed: bytes | None = None
    if isinstance(error, Exception) and not isinstance(error, asyncio.CancelledError):
        for candidate in (error, _Rebuilt(error)):
            try:
                data = pickle.dumps(candidate)
                if _same(pickle.loads(data), error):
                    packed = data
                    break
            except Exception:  # whatever pickling can raise: send the text alone
                continue
    return pickle.dumps((text, packed))


def load_error(payload: bytes) -> Exception:
    """The worker's exception with its traceback as a note, or an RL360Error that holds the text."""
    text, packed = pickle.loads(payload)
    if packed is not None:
        try:
            error = pickle.loads(packed)
        except Exception:  # its class cannot be imported on this side
            return RL360Error(text)
        if isinstance(error, Exception):
            error.add_note(text)
            return error
    return RL360Error(text)
