"""One client of the service for each process, with the configured key and address, that waits when told to.

In: the key variable's name, the address, the region, how patient to be. Out: Harbor's client manager. Left to others:
sandboxes (environment.py).

429 means that nothing was done, so every request is sent again after `Retry-After` or a growing pause, until the
patience is over; then the service's own error is raised. Uploads and downloads do not go through the generated client
and use `patiently`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from daytona import AsyncDaytona, DaytonaConfig
from daytona.common.errors import DaytonaError, DaytonaRateLimitError
from harbor.environments.daytona.environment import DaytonaClientManager
from harbor.environments.daytona.utils import is_transient_daytona_error
from harbor.utils.async_cleanup import register_async_cleanup

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
_log = logging.getLogger(__name__)


class MissingKey(RuntimeError):
    """The variable that should hold the key is not set."""


@dataclass(frozen=True)
class Account:
    """Whose sandboxes, where. `patience_s`: how long a request is repeated while the service says 429."""

    api_key_env: str
    api_url: str | None
    target: str | None
    patience_s: float

    def key(self) -> str:
        key = os.environ.get(self.api_key_env, "")
        if not key:
            raise MissingKey(f"sandbox=daytona: variable {self.api_key_env} is not set; export the key in it")
        return key


def pause_s(attempt: int, headers: Mapping[str, str] | None) -> float:
    """Seconds before the next try: what the service asked for, else 0.5, 1, 2 ... 30, each up to half longer."""
    asked = {name.lower(): value for name, value in (headers or {}).items()}.get("retry-after", "")
    if asked.replace(".", "", 1).isdigit():
        return min(float(asked), _LONGEST_PAUSE_S)
    return float(min(_FIRST_PAUSE_S * 2**attempt, _LONGEST_PAUSE_S) * (1 + random.random() / 2))


async def patiently[T](what: str, patience_s: float, call: Callable[[], Awaitable[T]]) -> T:
    """`call()`, again while the service has no room or says 429. Raises its last error after `patience_s`."""
    until = time.monotonic() + patience_s
    attempt = 0
    while True:
        try:
            return await call()
        except DaytonaError as error:
            if not is_transient_daytona_error(error) and not isinstance(error, DaytonaRateLimitError):
                raise
            pause = pause_s(attempt, error.headers)
            if time.monotonic() + pause > until:
                raise
            _log.info("daytona: %s: %s; again in %.1f s", what, error, pause)
        attempt += 1
        await asyncio.sleep(pause)


class Clients(DaytonaClientManager):
    """Harbor's manager, with our account instead of DAYTONA_* variables."""

    def __init__(self, account: Account):
        super().__init__()
        self._client: AsyncDaytona | None
        self.account = account

    async def get_client(self) -> AsyncDaytona:
        if self._client is None:
            account = self.account
            config = DaytonaConfig(
                api_key=account.key(),
                api_url=account.api_url or os.environ.get("DAYTONA_API_URL"),
                target=account.target,
                connection_pool_maxsize=None,
            )
            client = AsyncDaytona(config)
            for part in (client._api_client, client._toolbox_api_client):
                _make_patient(part.rest_client, account.patience_s)
            self._client = client
            register_async_cleanup(self._cleanup)
        return self._client


def _make_patient(rest_client: Any, patience_s: float) -> None:
    inner = rest_client.request

    async def request(*args: Any, **kwargs: Any) -> Any:
        until = time.monotonic() + patience_s
        attempt = 0
        while True:
            response = await inner(*args, **kwargs)
            if response.status != 429:
                return response
            pause = pause_s(attempt, response.headers)
            if time.monotonic() + pause > until:
                return response
            attempt += 1
            await asyncio.sleep(pause)

    rest_client.request = request


def install(account: Account) -> Clients:
    """The process's manager. Raises ValueError when another account is in use already."""
    there = DaytonaClientManager._instance
    if isinstance(there, Clients):
        if there.account != account:
            raise ValueError("one process uses one Daytona account: key variable, address and region must be the same")
        return there
    manager = Clients(account)
    DaytonaClientManager._instance = manager
    return manager


async def close() -> None:
    """Close the client, if there is one. The next sandbox makes a new one."""
    there, DaytonaClientManager._instance = DaytonaClientManager._instance, None
    if there is not None:
        await there._cleanup()
