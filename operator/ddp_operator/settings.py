"""The operator's settings: environment variables in, one frozen value out.

Every variable begins with ``DDP_OPERATOR_``. Unknown ones are not refused, because Kubernetes itself puts variables of
that form into the pod when a Service is named ``ddp-operator`` (service links).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, cast

PREFIX = "DDP_OPERATOR_"

_NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")


class SettingsError(ValueError):
    """A setting has a value that cannot be used. The message names the variable and what to write instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What an administrator may choose. The defaults are fit for production."""

    namespaces: tuple[str, ...] = ()
    """The namespaces to serve; empty: all of them (which needs a ClusterRole)."""
    workers: int = 16
    """How many resources are reconciled at the same time."""
    qps: float = 500.0
    """Calls a second to the API server, on average. The server's own fairness rules stay in charge above that."""
    burst: int = 1000
    """Calls that may be made at once after a quiet time."""
    call_timeout: float = 30.0
    """Seconds after which a call to the API server counts as failed."""
    progress_interval: float = 10.0
    """Seconds between two progress updates of one running job."""
    resync_interval: float = 300.0
    """Seconds between two comparisons of everything remembered with what the API server lists."""
    log_format: Literal["text", "json"] = "text"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    health_port: int = 8080
    """Port of /healthz, /readyz and /metrics; 0 takes a free one."""
    lease_name: str = "ddp-operator"
    """Name of the Lease by which several operators agree who works; it is in the operator's own namespace."""
    lease_seconds: int = 15
    """Seconds after which a leader that went silent is succeeded."""
    identity: str | None = None
    """Who holds the Lease: a name that no other process has at the same time. None: host name and a random part."""
    kubeconfig: str | None = None
    """$KUBECONFIG; None: the service account of the pod, else ~/.kube/config."""

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> Settings:
        """Read the settings from the environment. Raises: SettingsError."""
        env = os.environ if env is None else env
        default = cls()
        return cls(
            namespaces=_namespaces(env),
            workers=int(_number(env, "WORKERS", default.workers, 1, 1024, integral=True)),
            qps=_number(env, "QPS", default.qps, 0.1, 100_000),
            burst=int(_number(env, "BURST", default.burst, 1, 100_000, integral=True)),
            call_timeout=_number(env, "CALL_TIMEOUT", default.call_timeout, 0.5, 600),
            progress_interval=_number(env, "PROGRESS_INTERVAL", default.progress_interval, 1, 3600),
            resync_interval=_number(env, "RESYNC_INTERVAL", default.resync_interval, 1, 86_400),
            log_format=cast("Literal['text', 'json']", _choice(env, "LOG_FORMAT", default.log_format, "text", "json")),
            log_level=cast(
                "Literal['debug', 'info', 'warning', 'error']",
                _choice(env, "LOG_LEVEL", default.log_level, "debug", "info", "warning", "error"),
            ),
            health_port=int(_number(env, "HEALTH_PORT", default.health_port, 0, 65_535, integral=True)),
            lease_name=_name(env, "LEASE_NAME", default.lease_name),
            lease_seconds=int(_number(env, "LEASE_SECONDS", default.lease_seconds, 3, 3600, integral=True)),
            identity=env.get(f"{PREFIX}IDENTITY", "").strip() or None,
            kubeconfig=env.get("KUBECONFIG") or None,
        )


def describe() -> str:
    """Return the table of variables that ``--help`` prints."""
    default = Settings()
    rows = [
        ("NAMESPACES", "all", "namespaces to serve, separated by commas"),
        ("WORKERS", default.workers, "resources reconciled at the same time"),
        ("QPS", default.qps, "API calls a second, on average"),
        ("BURST", default.burst, "API calls at once after a quiet time"),
        ("CALL_TIMEOUT", default.call_timeout, "seconds until an API call counts as failed"),
        ("PROGRESS_INTERVAL", default.progress_interval, "seconds between progress updates of a job"),
        ("RESYNC_INTERVAL", default.resync_interval, "seconds between comparisons with the API server's lists"),
        ("LOG_FORMAT", default.log_format, "text or json"),
        ("LOG_LEVEL", default.log_level, "debug, info, warning or error"),
        ("HEALTH_PORT", default.health_port, "port of /healthz, /readyz and /metrics; 0: a free one"),
        ("LEASE_NAME", default.lease_name, "Lease, in the own namespace, whose holder works; others stand by"),
        ("LEASE_SECONDS", default.lease_seconds, "seconds after which a silent leader is succeeded"),
        ("IDENTITY", "host name and a random part", "holder of the Lease; no two processes may share it"),
    ]
    names = [f"{PREFIX}{name}" for name, _, _ in rows]
    width = max(map(len, names))
    return "\n".join(
        f"  {name:<{width}}  {text} (default: {value})" for name, (_, value, text) in zip(names, rows, strict=True)
    )


def _namespaces(env: Mapping[str, str]) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in env.get(f"{PREFIX}NAMESPACES", "").split(",") if name.strip()))
    for name in names:
        if not _NAMESPACE.fullmatch(name):
            raise SettingsError(
                f"{PREFIX}NAMESPACES: {name!r} is not the name of a namespace; "
                "write names separated by commas (patterns are not supported), or leave it empty to serve all"
            )
    return names


def _name(env: Mapping[str, str], name: str, default: str) -> str:
    text = env.get(f"{PREFIX}{name}", "").strip() or default
    if not _NAMESPACE.fullmatch(text):
        raise SettingsError(
            f"{PREFIX}{name}: {text!r} is not a name: write lower-case letters, digits and '-', from 1 to 63 "
            f"of them; the default is {default}"
        )
    return text


def _number(
    env: Mapping[str, str], name: str, default: float, low: float, high: float, *, integral: bool = False
) -> float:
    text = env.get(f"{PREFIX}{name}", "").strip()
    if not text:
        return default
    try:
        value = float(int(text)) if integral else float(text)
    except ValueError:
        value = float("nan")
    if not low <= value <= high:  # also refuses NaN
        kind = "a whole number" if integral else "a number"
        raise SettingsError(
            f"{PREFIX}{name}: {text!r} is not {kind} from {low:g} to {high:g}; the default is {default:g}"
        )
    return value


def _choice(env: Mapping[str, str], name: str, default: str, *choices: str) -> str:
    text = env.get(f"{PREFIX}{name}", "").strip().lower()
    if not text:
        return default
    if text not in choices:
        raise SettingsError(f"{PREFIX}{name}: {text!r} is not one of {', '.join(choices)}")
    return text
