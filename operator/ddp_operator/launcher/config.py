"""What the operator configures of a launcher: one JSON document in one variable, of the same type on both sides."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from .contract import ENV_LAUNCHER_CONFIG


@dataclasses.dataclass(frozen=True)
class WatchdogConfig:
    """spec.watchdog."""

    start_seconds: float
    stall_seconds: float
    checkpoint_seconds: float
    action: str


@dataclasses.dataclass(frozen=True)
class PreflightConfig:
    """spec.preflight, where there is something to check. ``fail``: a problem ends the pod."""

    fail: bool
    checks: tuple[str, ...]
    min_bytes_per_second: float


@dataclasses.dataclass(frozen=True)
class LauncherConfig:
    """A job as all of its pods see it; of an elastic one ``nodes`` are those at its start."""

    nodes: int
    nproc_per_node: int
    elastic: bool
    in_place_restarts: int
    join_timeout_seconds: float
    non_retryable_exit_codes: tuple[int, ...]
    success_policy: str
    watchdog: WatchdogConfig | None
    preflight: PreflightConfig | None
    log_patterns: tuple[str, ...]
    epochs: int | None


_NESTED = {"watchdog": WatchdogConfig, "preflight": PreflightConfig}


def encode_config(config: LauncherConfig) -> str:
    """Return the document."""
    return json.dumps(_to_json(config), separators=(",", ":"))


def decode_config(text: str | None) -> LauncherConfig:
    """Read the document. Raises: ValueError that names the variable and the field."""
    if not text:
        raise ValueError(f"{ENV_LAUNCHER_CONFIG} is not set; pods are started by the operator or `ddp run`")
    try:
        config: LauncherConfig = _from_json(LauncherConfig, json.loads(text))
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{ENV_LAUNCHER_CONFIG} cannot be read: {type(error).__name__}: {error}") from None
    return config


def _to_json(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {_key(field): _to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return value


def _from_json(kind: Any, raw: Any) -> Any:
    values = {field.name: raw[_key(field)] for field in dataclasses.fields(kind)}
    for name, value in values.items():
        if name in _NESTED and value is not None:
            values[name] = _from_json(_NESTED[name], value)
        elif isinstance(value, list):
            values[name] = tuple(value)
    return kind(**values)


def _key(field: Any) -> str:
    first, *others = str(field.name).split("_")
    return first + "".join(word.capitalize() for word in others)
