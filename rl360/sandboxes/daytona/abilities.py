"""What is missing to use Daytona: its package, the key's variable. For check and doctor.

In: the names from the configuration, and the environment. Out: an `Ability` each. Nothing is sent anywhere, and no key
is read: only whether its variable is set. Standard library only.
"""

from __future__ import annotations

import importlib.util
import os

from rl360.sandboxes.abilities import Ability

DEFAULT_KEY_VARIABLE = "DAYTONA_API_KEY"
URL_VARIABLE = "DAYTONA_API_URL"


def probe(api_key_env: str = DEFAULT_KEY_VARIABLE, api_url: str | None = None) -> tuple[Ability, ...]:
    """`api_key_env`: the name of the variable that holds the key. `api_url`: of the configuration."""
    has_package = importlib.util.find_spec("daytona") is not None
    has_key = bool(os.environ.get(api_key_env))
    where = api_url or os.environ.get(URL_VARIABLE) or "the public service"
    usable = not where.startswith("http") or where.startswith(("https://", "http://127.0.0.1", "http://localhost"))
    return (
        Ability(
            "daytona package", has_package, True, "installed" if has_package else "not installed",
            "install the extra: uv pip install --no-deps --require-hashes -r requirements/daytona.txt",
        ),
        Ability(
            "daytona key", has_key, True, f"{api_key_env} is set" if has_key else f"variable {api_key_env} is not set",
            "export it, or name another variable with sandbox.kwargs.api_key_env",
        ),
        Ability(
            "daytona address", usable, True, where if usable else f"{where} would send the key unencrypted",
            "expected https://... in sandbox.kwargs.api_url or DAYTONA_API_URL",
        ),
    )  # fmt: skip
