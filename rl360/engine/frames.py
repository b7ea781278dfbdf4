"""Files of zstd frames, one JSON record a frame: append, read lazily, read one, survive a torn end.

In: JSON-able records. Out: a file that `zstd -dc` turns into JSON lines, and the byte range of each record. Left to
others: what a record says (journal.py, codec.py).

Each frame holds one record and a checksum, so that a crash in the middle of an append loses that append only, and one
record is read by its offset alone. Short records pay for it: 32 attempts of one turn that share four prompts take 55 kB
this way and 21 kB in one frame. Long ones do not.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import zstandard

log = logging.getLogger(__name__)

LEVEL = 3  # level 12 saves 3 % on attempts of one turn, for twice the time
CHUNK_BYTES = 1 << 18


def pack(record: Mapping[str, Any]) -> bytes:
    """One frame. Raises ValueError for NaN and infinity, which JSON lacks."""
    line = json.dumps(record, separators=(",", ":"), allow_nan=False) + "\n"
    return zstandard.ZstdCompressor(level=LEVEL, write_checksum=True).compress(line.encode())


def append(path: Path, frames: Sequence[bytes], *, durable: bool = True) -> list[int]:
    """Append whole frames in one write; returns the offset of each."""
    with naming(path), open(path, "ab") as file:
        offset = file.seek(0, os.SEEK_END)
        file.write(b"".join(frames))
        file.flush()
        if durable:
            os.fsync(file.fileno())
    offsets = []
    for frame in frames:
        offsets.append(offset)
        offset += len(frame)
    return offsets


def read_one(path: Path, offset: int) -> dict[str, Any]:
    """The record whose frame begins at `offset`."""
    for _, _, record in scan(path, offset):
        return record
    raise ValueError(f"{path}: no whole record at byte {offset}")


def scan(path: Path, start: int = 0) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Yield (offset, end, record) of each whole frame from `start` on, holding one at a time. Stops at a torn end."""
    with open(path, "rb") as file:
        file.seek(start)
        pending = b""
        offset = start
        while True:
            decoder = zstandard.ZstdDecompressor().decompressobj()
            parts: list[bytes] = []
            used = 0
            while not decoder.eof:
                chunk = pending or file.read(CHUNK_BYTES)
                pending = b""
                if not chunk:
                    return  # a torn end, or the file's own
                try:
                    parts.append(decoder.decompress(chunk))
                except zstandard.ZstdError:
                    return
                used += len(chunk)
            pending = decoder.unused_data
            end = offset + used - len(pending)
            try:
                record = json.loads(b"".join(parts))
            except ValueError:
                return
            yield offset, end, record
            offset = end


def mend(path: Path, start: int = 0) -> int:
    """Cut a torn end off; returns the size. `start` is a known frame boundary to scan from. No file: 0."""
    if not path.exists():
        return 0
    good_end = start
    for _, end, _ in scan(path, start):
        good_end = end
    if (size := path.stat().st_size) > good_end:
        log.warning("%s: cut a torn end of %d bytes off", path, size - good_end)
        os.truncate(path, good_end)
    return good_end


def replace_file(path: Path, data: bytes) -> None:
    """Write beside, sync, rename: a reader sees the old content or the new."""
    beside = path.with_name(f".{path.name}.tmp")
    with naming(path), open(beside, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
    sync_folder(path.parent)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """An OSError of a write says what was written: of its own it knows that only where a file is opened."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def sync_folder(folder: Path) -> None:
    """Make renames and new names in a folder durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
