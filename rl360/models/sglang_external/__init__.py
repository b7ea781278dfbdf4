"""Models for SGLang releases that do not have them yet: SGLANG_EXTERNAL_MODEL_PACKAGE=rl360.models.sglang_external.

In: a model_type and SGLang's version. Out: what a server of it needs in its environment and on its command line. The
modules beside this file are imported by SGLang itself, in the processes that hold weights: each has an `EntryClass`.
Starting servers is left to rl360.serving. Importing this package imports neither sglang nor torch.
"""

from __future__ import annotations

import re

VARIABLE = "SGLANG_EXTERNAL_MODEL_PACKAGE"
PACKAGE = "rl360.models.sglang_external"
# The first release with a model of its own. Ours would take its place there, so the variable must not be set.
NATIVE_SINCE = {"k2_horizon": (0, 5, 20)}


def is_external(model_type: str, sglang_version: str) -> bool:
    """Whether this SGLang takes the model from here. A version is read as its first three numbers: 0.5.16.post1."""
    since = NATIVE_SINCE.get(model_type)
    return since is not None and tuple(int(n) for n in re.findall(r"\d+", sglang_version)[:3]) < since


def server_environment(model_type: str, sglang_version: str) -> dict[str, str]:
    """Variables for the server's process and its children; rl360 must be importable there."""
    return {VARIABLE: PACKAGE} if is_external(model_type, sglang_version) else {}


def server_flags(model_type: str, sglang_version: str) -> list[str]:
    """Flags that the model needs. --trust-remote-code: the configuration class is read from the checkpoint's folder,
    by SGLang's front process as well, which imports no models; `rl360 model prepare` has put ours there."""
    return ["--trust-remote-code"] if is_external(model_type, sglang_version) else []
