"""What the operator configures of a launcher: one JSON document in one variable, of the same type on both sides."""

from __future__ import annotations

import dataclasses
import json
import re
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


_NESTED = {"WatchdogConfig": WatchdogConfig, "PreflightConfig": PreflightConfig}
_PLAIN: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "bool": (bool,), "str": (str,)}


def encode_config(config: LauncherConfig) -> str:
    """Return the document."""
    return json.dumps(_to_json(config), separators=(",", ":"))


def decode_config(text: str | None) -> LauncherConfig:
    """Read the document. Raises: ValueError that names the variable and the field."""
    if not text:
        raise ValueError(f"{ENV_LAUNCHER_CONFIG} is not set; pods are started by the operator or `ddp run`")
    try:
        config: LauncherConfig = _from_json(LauncherConfig, json.loads(text), "")
    except ValueError as error:
        raise ValueError(f"{ENV_LAUNCHER_CONFIG} cannot be read: {error}") from None
    return config


def _to_json(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {_key(field): _to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return value


def _from_json(kind: Any, raw: Any, place: str) -> Any:
    if not isinstance(raw, dict):
        raise ValueError(f"{place or 'it'} is not an object")
    values = {}
    for field in dataclasses.fields(kind):
        path = f"{place}.{_key(field)}".lstrip(".")
        if _key(field) not in raw:
            raise ValueError(f"{path} is missing")
        values[field.name] = _value(str(field.type), raw[_key(field)], path)
    return kind(**values)


def _value(kind: str, raw: Any, path: str) -> Any:
    kind, optional, _ = kind.partition(" | None")
    if optional and raw is None:
        return None
    if kind in _NESTED:
        return _from_json(_NESTED[kind], raw, path)
    item = re.fullmatch(r"tuple\[(\w+), \.\.\.\]", kind)
    if item and isinstance(raw, list):
        return tuple(_value(item[1], one, f"{path}[{number}]") for number, one in enumerate(raw))
    if item or not isinstance(raw, _PLAIN[kind]) or (isinstance(raw, bool) and kind != "bool"):
        raise ValueError(f"{path}: {raw!r} is not of type {kind}")
    return raw


def _key(field: Any) -> str:
    first, *others = str(field.name).split("_")
    return first + "".join(word.capitalize() for word in others)
