"""What fits together in the gateway's keys, and what of it this machine must have.

In: a typed config. Out: problems as `key: what; expected; try`. Left to others: single values (combinations.py).
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterator

from rl360.config.schemas import GatewayConfig, RootConfig, SmgGatewayConfig
from rl360.gateway.ports import bind_error
from rl360.serving.secrets import is_secret_flag

# Arguments that SMG gets from us.
_OURS = ("--host", "--port", "--prometheus-host", "--prometheus-port", "--policy", "--worker-urls")
_KEY = re.compile(r"[!-~]+")
# A request that SMG sends a second time, or to another engine, is one that nobody counts.
_RETRIES = ("--retry-max-retries", "--worker-overload-protection", "--worker-overload-shed")


def gateway_problems(config: RootConfig) -> Iterator[str]:
    """Wrong values and combinations."""
    gateway = config.gateway
    if not isinstance(gateway, SmgGatewayConfig):
        return
    ports = [(key, getattr(gateway, key)) for key in ("port", "smg_port", "metrics_port")]
    for index, (key, port) in enumerate(ports):
        same = [other for other, taken in ports[:index] if port and taken == port]
        if same:
            yield f"gateway.{key}: {port} is gateway.{same[0]} too; expected another, or 0 to take any"
    for argument in gateway.smg_args:
        name = argument.partition("=")[0]
        if name in _OURS:
            yield f"gateway.smg_args: {name} is set by RL360; expected the key of gateway that stands for it"
        elif is_secret_flag(name):
            yield f"gateway.smg_args: {name} would store a secret; name the variable in gateway.api_key_env"
        elif name in _RETRIES:
            yield (
                f"gateway.smg_args: {name} lets SMG send requests elsewhere by itself, uncounted; expected none: the "
                "session proxy sends again what failed"
            )
    if gateway.health_interval_s >= config.rollout.request_timeout_s:
        yield (
            f"gateway.health_interval_s: {gateway.health_interval_s:g} s; a dead engine would be noticed after the "
            f"requests to it have timed out (rollout.request_timeout_s {config.rollout.request_timeout_s:g} s); "
            "expected less"
        )


def gateway_machine_problems(config: RootConfig) -> Iterator[str]:
    """What the gateway needs and this machine has not."""
    gateway = config.gateway
    yield from _key_problems(config)
    if isinstance(gateway, SmgGatewayConfig) and importlib.util.find_spec("smg") is None:
        yield "gateway: smg is not installed; it is in the extra `cluster`: pip install 'rl360[cluster]'"
    if error := bind_error(gateway.host, 0):
        yield f"gateway.host: {gateway.host} is no address of this machine ({error}); expected one, such as 127.0.0.1"
        return
    for key in ("port", "smg_port", "metrics_port"):
        yield from _port_problem(gateway, key)


def _key_problems(config: RootConfig) -> Iterator[str]:
    """None of them quotes the key."""
    name = config.gateway.api_key_env
    if not name:
        return
    key = os.environ.get(name)
    if key is None:
        yield "gateway.api_key_env: the variable that it names is not set; expected the engines' key in it"
    elif not _KEY.fullmatch(key):
        yield (
            "gateway.api_key_env: the key in it is empty or has other characters than an HTTP header takes (spaces, "
            "line ends, letters beyond ASCII); expected printable ASCII"
        )
    elif config.rollout.engine == "sglang" and key.startswith("-"):
        yield "gateway.api_key_env: the key in it begins with -, and SGLang takes that for a flag; expected another key"


def _port_problem(gateway: GatewayConfig, key: str) -> Iterator[str]:
    """A fixed port that somebody else holds is said before anything starts."""
    port = getattr(gateway, key, 0)
    if port and (error := bind_error(gateway.host, port)):
        yield f"gateway.{key}: {port} on {gateway.host} cannot be used ({error}); expected a free one, or 0 to take any"
