"""What the operator decided for the pods of an attempt: one JSON document in one variable, read by the launcher."""

import dataclasses
import json
from typing import Any

from .names import ENV_LAUNCHER_CONFIG


@dataclasses.dataclass(frozen=True)
class WatchdogConfig:
    """spec.watchdog."""

    start_seconds: float
    stall_seconds: float
    checkpoint_seconds: float
    action: str


@dataclasses.dataclass(frozen=True)
class PreflightConfig:
    """spec.preflight and spec.network, if they configure a check. ``fail``: any problem ends the pod.

    ``require``: a problem of the network between ranks ends the pod even without ``fail``. ``transports``: the allowed
    ones, by the names of ``nccl_log``; empty: any, except sockets if ``require`` is set.
    """

    fail: bool
    checks: tuple[str, ...]
    min_bytes_per_second: float
    min_pair_bytes_per_second: float = 0.0
    require: bool = False
    transports: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class CodeConfig:
    """spec.code: the archive, the folder to unpack it in, and the folder for the packages of ``requirements``."""

    archive: str
    digest: str
    folder: str
    requirements: str | None
    packages: str


@dataclasses.dataclass(frozen=True)
class CheckpointStoreConfig:
    """spec.checkpoint with a URL. ``keep``: how many snapshots of the folder are kept there."""

    url: str
    keep: int


@dataclasses.dataclass(frozen=True)
class LauncherConfig:
    """The configuration that all pods of a job share. ``nodes``: in an elastic job the number at its start.

    ``spares``: pods on standby in addition to ``nodes``. ``restarts_without_progress``: how many failures in a row
    without a new step are recovered in the same pods; None: no limit.
    """

    nodes: int
    spares: int
    nproc_per_node: int
    elastic: bool
    in_place_restarts: int
    restarts_without_progress: int | None
    join_timeout_seconds: float
    non_retryable_exit_codes: tuple[int, ...]
    success_policy: str
    watchdog: WatchdogConfig | None
    preflight: PreflightConfig | None
    checkpoint: CheckpointStoreConfig | None
    log_patterns: tuple[str, ...]
    auto_instrument: bool
    epochs: int | None
    warm_start: bool
    code: CodeConfig | None

    @property
    def regroups(self) -> bool:
        """Whether pods can join and leave the group while the job runs."""
        return self.elastic or self.spares > 0

    @property
    def awaits_peers(self) -> bool:
        """Whether the workers, after losing a peer, restart uncounted and wait for it in the rendezvous."""
        has_budget = self.in_place_restarts > 0 and self.restarts_without_progress is not None
        return self.elastic or (self.nodes > 1 and has_budget)


_NESTED = {
    "watchdog": WatchdogConfig,
    "preflight": PreflightConfig,
    "checkpoint": CheckpointStoreConfig,
    "code": CodeConfig,
}


def encode_config(config: LauncherConfig) -> str:
    """Return the configuration as a JSON document."""
    return json.dumps(to_json(config), separators=(",", ":"))


def decode_config(text: str | None) -> LauncherConfig:
    """Read the JSON document. Raises: ValueError that names the variable and the field."""
    if not text:
        raise ValueError(f"{ENV_LAUNCHER_CONFIG} is not set; the operator and `ddp run` set it")
    try:
        config: LauncherConfig = from_json(LauncherConfig, json.loads(text))
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{ENV_LAUNCHER_CONFIG} cannot be read: {type(error).__name__}: {error}") from None
    return config


def to_json(value: Any) -> Any:
    """Return the JSON object of a record, with its field names in camelCase."""
    if dataclasses.is_dataclass(value):
        return {_key(field): to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return value


def from_json(kind: Any, raw: Any) -> Any:
    """Return a record of a dataclass from its JSON object. Raises: KeyError, TypeError for a missing field."""
    values = {field.name: raw[_key(field)] for field in dataclasses.fields(kind)}
    for name, value in values.items():
        if name in _NESTED and value is not None:
            values[name] = from_json(_NESTED[name], value)
        elif isinstance(value, list):
            values[name] = tuple(value)
    return kind(**values)


def _key(field: Any) -> str:
    first, *rest = str(field.name).split("_")
    return first + "".join(part.capitalize() for part in rest)


def loopback_address(index: int) -> str:
    """Return the address of a pod on this machine."""
    return "127.0.0.1" if index == 0 else f"127.0.{100 + index // 100}.{100 + index % 100}"
