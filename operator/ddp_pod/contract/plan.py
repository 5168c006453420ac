"""What the operator decided for the pods of an attempt: one JSON document in one variable, read by the launcher.

Unknown fields are ignored, and missing fields have their defaults: the operator also reads the plans of Jobs that a
former or a later version has created. A pod always has the launcher that its plan is for.
"""

import dataclasses
import json
import types
from typing import Any, Final, get_args, get_origin

from .names import ENV_LAUNCHER_CONFIG
from .records import json_name

VERSION: Final = 1
"""Of a PodPlan. Plans of the first releases have none, which reads as 0, and torchrun's flags beside them."""


@dataclasses.dataclass(frozen=True)
class WatchdogConfig:
    """spec.watchdog."""

    start_seconds: float
    stall_seconds: float
    checkpoint_seconds: float
    action: str


@dataclasses.dataclass(frozen=True)
class PreflightConfig:
    """spec.preflight, if it configures a check. ``fail``: any problem ends the pod.

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
class DevConfig:
    """spec.dev: the pod is held between runs. ``runs``: the number of runs of former attempts, whose code is lost."""

    hold_seconds: float
    runs: int = 0


@dataclasses.dataclass(frozen=True)
class CheckpointStoreConfig:
    """spec.checkpoint with a URL. ``keep``: how many snapshots of the folder are kept there."""

    url: str
    keep: int


@dataclasses.dataclass(frozen=True)
class TorchrunOptions:
    """The flags of torchrun that a user may set, by torchrun's names. None: torchrun's default."""

    role: str | None = None
    monitor_interval: float | None = None
    start_method: str | None = None
    event_log_handler: str | None = None
    log_dir: str | None = None
    redirects: str | None = None
    tee: str | None = None
    logs_specs: str | None = None
    local_ranks_filter: str | None = None
    duplicate_stdout_filters: tuple[str, ...] | None = None
    duplicate_stderr_filters: tuple[str, ...] | None = None
    numa_binding: str | None = None
    virtual_local_rank: bool | None = None

    def list_output_flags(self) -> list[str]:
        """Return the flags among them that redirect the ranks' output, so that the launcher does not read it."""
        return [name for name in ("redirects", "tee", "logs_specs") if getattr(self, name) is not None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PodPlan:
    """The plan that all pods of an attempt share. ``nodes``: in an elastic job the number at its start.

    ``min_nodes``, ``max_nodes``: of an elastic job. ``spares``: pods on standby in addition to ``nodes``.
    ``pod_host``: the pods' DNS name, with ``{}`` for the index. ``program``: whether the command is no Python.
    ``restarts_without_progress``: how many failures in a row without a new step are recovered in the same pods; None:
    no limit.
    """

    version: int
    nodes: int
    spares: int
    nproc_per_node: int
    elastic: bool
    min_nodes: int = 0
    max_nodes: int = 0
    rendezvous_backend: str = "c10d"
    pod_host: str = ""
    program: bool = False
    torchrun: TorchrunOptions = TorchrunOptions()
    in_place_restarts: int
    restarts_without_progress: int | None = None
    join_timeout_seconds: float
    non_retryable_exit_codes: tuple[int, ...]
    success_policy: str
    watchdog: WatchdogConfig | None = None
    preflight: PreflightConfig | None = None
    checkpoint: CheckpointStoreConfig | None = None
    log_patterns: tuple[str, ...] = ()
    auto_instrument: bool
    epochs: int | None = None
    warm_start: bool
    code: CodeConfig | None = None
    dev: DevConfig | None = None

    @property
    def regroups(self) -> bool:
        """Whether pods can join and leave the group while the job runs."""
        return self.elastic or self.spares > 0

    @property
    def awaits_peers(self) -> bool:
        """Whether the workers, after losing a peer, restart uncounted and wait for it in the rendezvous."""
        has_budget = self.in_place_restarts > 0 and self.restarts_without_progress is not None
        return self.elastic or (self.nodes > 1 and has_budget)


def encode_plan(plan: PodPlan) -> str:
    """Return the plan as a JSON document."""
    return json.dumps(to_json(plan), separators=(",", ":"))


def decode_plan(text: str | None) -> PodPlan:
    """Read the JSON document. Raises: ValueError that names the variable and the field."""
    if not text:
        raise ValueError(f"{ENV_LAUNCHER_CONFIG} is not set; the operator and `ddp run` set it")
    try:
        plan: PodPlan = from_json(PodPlan, {"version": 0} | json.loads(text))
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{ENV_LAUNCHER_CONFIG} cannot be read: {error}") from None
    return plan


def to_json(value: Any) -> Any:
    """Return the JSON object of a record: its fields in camelCase, without those that have their default."""
    if not dataclasses.is_dataclass(value):
        return value
    fields = {field: getattr(value, field.name) for field in dataclasses.fields(value)}
    return {json_name(field.name): to_json(item) for field, item in fields.items() if item != field.default}


def from_json(kind: Any, raw: Any) -> Any:
    """Return a value of a field's type from its JSON form. Raises: TypeError, ValueError for a missing field."""
    if dataclasses.is_dataclass(kind):
        return _read_record(kind, raw)
    if isinstance(kind, types.UnionType):  # with None
        return None if raw is None else from_json(get_args(kind)[0], raw)
    if get_origin(kind) is tuple:
        if not isinstance(raw, list):
            raise TypeError("is no list")
        return tuple(from_json(get_args(kind)[0], item) for item in raw)
    accepted = (int, float) if kind is float else kind
    if not isinstance(raw, accepted) or isinstance(raw, bool) != (kind is bool):
        raise TypeError(f"is no {kind.__name__}")
    return raw


def _read_record(kind: Any, raw: Any) -> Any:
    if not isinstance(raw, dict):
        raise TypeError("is no object")
    values = {}
    for field in dataclasses.fields(kind):
        key = json_name(field.name)
        if key not in raw:
            if field.default is dataclasses.MISSING:
                raise ValueError(f"{key} is missing")
            continue
        try:
            values[field.name] = from_json(field.type, raw[key])
        except TypeError as error:
            raise ValueError(f"{key} {error}") from None
    return kind(**values)


def loopback_address(index: int) -> str:
    """Return the address of a pod on this machine."""
    return "127.0.0.1" if index == 0 else f"127.0.{100 + index // 100}.{100 + index % 100}"
