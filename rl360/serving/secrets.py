"""The servers' key on its way to a server, and out of everything that is written of one.

In: the key, command lines, a server's output. Out: a file that only this user may read and that is gone once the server
is ready or has ended; the same lines without the key. Nothing here puts it on a command line or into an environment.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

HIDDEN = "..."
# Flags of SGLang 0.5.16 whose value is a secret, and the shortest beginning that argparse takes for each.
SECRET_FLAGS = {"--api-key": "--ap", "--admin-api-key": "--ad", "--ssl-keyfile-password": "--ssl-keyfile-"}
SECRET_ENDS = ("api-key", "api-keys", "password")  # of flags that other commands take
CONFIG_FLAG = "--config"  # SGLang reads further flags from a YAML file, inside its process


def is_secret_flag(word: str) -> bool:
    """Whether a word of a command line, `--flag` or `--flag=value`, names a secret, also when it is cut short."""
    name = word.partition("=")[0]
    if name.startswith("--") and name.endswith(SECRET_ENDS):
        return True
    return any(flag.startswith(name) and name.startswith(short) for flag, short in SECRET_FLAGS.items())


def shown(command: Sequence[str]) -> str:
    """A command line for the log, without the secrets in it."""
    words: list[str] = []
    hide = False
    for word in command:
        name, equals, _ = word.partition("=")
        secret = not hide and is_secret_flag(word)
        words.append(HIDDEN if hide else f"{name}={HIDDEN}" if secret and equals else word)
        hide = secret and not equals
    return " ".join(words)


class KeyFile:
    """A YAML file, {api-key: KEY}, with mode 0600 in a folder with mode 0700 under TMPDIR. Raises OSError."""

    def __init__(self, key: str) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="rl360-key-"))
        self.path = self._folder / "server.yaml"  # SGLang takes no other suffix
        try:
            with os.fdopen(os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
                json.dump({"api-key": key}, file)  # JSON is YAML
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """Idempotent."""
        remove_key_file(self.path)


def read_key_file(path: Path) -> str:
    """Raises OSError, ValueError for another file."""
    return str(json.loads(path.read_text())["api-key"])


def remove_key_file(path: Path) -> None:
    """The file and its folder. Idempotent."""
    with suppress(OSError):
        path.unlink()
    with suppress(OSError):
        path.parent.rmdir()


class Redactor:
    """A stream of bytes without the key in it, however it is cut into pieces. What may be the key's beginning is kept
    back until the next piece, or `rest`."""

    def __init__(self, key: str) -> None:
        written = {key, repr(key)[1:-1], json.dumps(key)[1:-1]}  # as it is, in a dataclass's repr, in JSON
        self._forms = sorted((form.encode() for form in written), key=len, reverse=True)
        self._pattern = re.compile(b"|".join(map(re.escape, self._forms)))
        self._kept = b""

    def feed(self, piece: bytes) -> bytes:
        text = self._kept + piece
        end = 0
        for found in self._pattern.finditer(text):
            end = found.end()
        keep = self._beginning(text[end:])
        self._kept = text[len(text) - keep :]
        return self._pattern.sub(HIDDEN.encode(), text[: len(text) - keep])

    def rest(self) -> bytes:
        kept, self._kept = self._kept, b""
        return kept

    def _beginning(self, tail: bytes) -> int:
        """The most bytes at the end of `tail` with which a form begins."""
        longest = min(len(tail), len(self._forms[0]) - 1)
        ends = (tail[len(tail) - count :] for count in range(longest, 0, -1))
        return next((len(end) for end in ends if any(form.startswith(end) for form in self._forms)), 0)
