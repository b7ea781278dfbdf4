"""A probe as the URL that a trial's agent gets in the place of a model's: `probe://<name>?solution=<folder>`.

In and out: the name of a probe and the folder of the task's solution. Harbor is not imported, so that the command line
can build what only the agent in a trial worker reads.
"""

from __future__ import annotations

from pathlib import Path
from urllib.parse import parse_qs, quote, urlsplit


def probe_url(name: str, solution: Path) -> str:
    return f"probe://{name}?solution={quote(str(solution))}"


def read_probe_url(url: str) -> tuple[str, Path]:
    """(name, solution folder). The inverse of `probe_url`."""
    parts = urlsplit(url)
    return parts.netloc, Path(parse_qs(parts.query)["solution"][0])
