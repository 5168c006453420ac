"""The operator's settings: environment variables in, one frozen value out.

Every variable begins with ``DDP_OPERATOR_``. Unknown ones are not refused, because Kubernetes itself puts variables of
that form into the pod when a Service is named ``ddp-operator`` (service links).
"""

import os
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

import msgspec
from msgspec import Meta

PREFIX = "DDP_OPERATOR_"
_Name = Annotated[str, Meta(pattern="^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$")]


class SettingsError(ValueError):
    """A setting has a value that cannot be used. The message names the variable and what to write instead."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What an administrator may choose. The defaults are fit for production. Intervals and times are in seconds."""

    namespaces: Annotated[
        tuple[_Name, ...], Meta(description="names of the namespaces to serve, separated by commas; unset: all")
    ] = ()
    workers: Annotated[int, Meta(ge=1, le=1024, description="resources reconciled at the same time")] = 16
    qps: Annotated[float, Meta(ge=0.1, le=100_000, description="API calls a second, on average")] = 500
    burst: Annotated[int, Meta(ge=1, le=100_000, description="API calls at once after a quiet time")] = 1000
    call_timeout: Annotated[float, Meta(ge=0.5, le=600, description="seconds until an API call counts as failed")] = 30
    progress_interval: Annotated[
        float, Meta(ge=1, le=3600, description="seconds between progress updates of a job")
    ] = 10
    resync_interval: Annotated[
        float, Meta(ge=1, le=86_400, description="seconds between comparisons with the API server's lists")
    ] = 300
    log_format: Annotated[Literal["text", "json"], Meta(description="text or json")] = "text"
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="debug, info, warning or error")
    ] = "info"
    health_port: Annotated[
        int, Meta(ge=0, le=65_535, description="port of /healthz, /readyz and /metrics; 0: a free one")
    ] = 8080
    lease_name: Annotated[
        _Name, Meta(description="Lease, in the own namespace, whose holder works; others stand by")
    ] = "ddp-operator"
    lease_seconds: Annotated[
        int, Meta(ge=3, le=3600, description="seconds after which a silent leader is succeeded")
    ] = 15
    job_defaults: Annotated[
        dict[str, Any],
        Meta(description="networkPolicy and securityProfile of jobs that do not set them, as a spec in JSON"),
    ] = {}
    identity: Annotated[
        str | None,
        Meta(description="holder of the Lease; no two processes may share it; unset: host name and a random part"),
    ] = None
    kubeconfig: str | None = None
    """$KUBECONFIG; None: the service account of the pod, else ~/.kube/config."""

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> Self:
        """Read the settings from the environment. Raises: SettingsError."""
        env = os.environ if env is None else env
        values: dict[str, object] = {"kubeconfig": env.get("KUBECONFIG") or None}
        for name, (kind, text) in _describe_variables().items():
            given = env.get(f"{PREFIX}{name.upper()}", "").strip()
            value: object = given
            if name == "namespaces":
                value = tuple(dict.fromkeys(filter(None, map(str.strip, given.split(",")))))
            elif name in ("log_format", "log_level"):
                value = given.lower()
            try:
                if name == "job_defaults" and given:
                    value = msgspec.json.decode(given)
                values |= {name: msgspec.convert(value, kind, strict=False)} if value else {}
            except msgspec.DecodeError as error:
                problem = str(error).partition(" - at")[0].partition(", got")[0]
                problem = problem.replace("`int`", "a whole number").replace("`float`", "a number")
                raise SettingsError(
                    f"{PREFIX}{name.upper()}: {given!r} cannot be used: {problem}. It sets: {text}"
                ) from None
        return cls(**values)  # type: ignore[arg-type]


def describe() -> str:
    """Return the table of variables that ``--help`` prints."""
    return "\n".join(f"  {PREFIX}{name.upper():<17}  {text}" for name, (_, text) in _describe_variables().items())


def _describe_variables() -> dict[str, tuple[object, str]]:
    """Return the type of every setting with a variable of ours, and what that is."""
    found = {}
    for field in msgspec.structs.fields(Settings):
        about = [part.description for part in getattr(field.type, "__metadata__", ()) if part.description]
        default = f" (default: {field.default})" if field.default not in (None, (), msgspec.NODEFAULT) else ""
        if about:
            found[field.name] = (field.type, f"{about[0]}{default}")
    return found
