"""Whether what a trainer publishes is the model: the names of its tensors against those of the model's config.

In: names, an HF folder with a config.json. Out: a problem in words, or None. Who is asked for names is left to
.transports, shapes and values to those who load them.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from rl360.models.loading import CONFIG_FILE, read_config
from rl360.models.weight_files import IGNORED_SUFFIX, expected_tensors

QUOTED_NAMES = 5


def name_problem(sent: Collection[str], model_dir: Path) -> str | None:
    """How `sent` differs from the names of every tensor of the model; a tied one has no head of its own.

    Raises ConfigError for a config that is not there or not understood.
    """
    config = read_config(model_dir)
    expected = expected_tensors(config)
    missing = [name for name in expected if name not in sent]
    extra = sorted(name for name in sent if name not in expected and not name.endswith(IGNORED_SUFFIX))
    parts = []
    if missing:
        parts.append(f"{_quoted(missing)} not sent")
    if extra:
        parts.append(f"{_quoted(extra)} not in a model of this config")
    tied = str(config.tie_word_embeddings).lower()
    where = f"{Path(model_dir) / CONFIG_FILE}: {config.model_type}, tie_word_embeddings {tied}"
    return f"{'; '.join(parts)} ({where})" if parts else None


def _quoted(names: list[str]) -> str:
    more = f" and {len(names) - QUOTED_NAMES} more" if len(names) > QUOTED_NAMES else ""
    return f"{', '.join(names[:QUOTED_NAMES])}{more}"
