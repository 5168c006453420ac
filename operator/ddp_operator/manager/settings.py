"""The operator's settings, read from environment variables.

Every variable has the prefix ``DDP_OPERATOR_``. Unknown ones are not refused, because Kubernetes adds variables with
that prefix to the pod if a Service is named ``ddp-operator`` (service links).
"""

import os
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self, get_args, get_origin

import msgspec
from msgspec import Meta

from ddp_operator.decide.hooks import Feature

PREFIX = "DDP_OPERATOR_"
_Name = Annotated[str, Meta(pattern="^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$")]


class SettingsError(ValueError):
    """A setting has an invalid value. The message names the variable and describes valid values."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings for administrators, with defaults for production. Intervals and times are in seconds."""

    namespaces: Annotated[
        tuple[_Name, ...], Meta(description="namespaces to serve, separated by commas; unset: all")
    ] = ()
    workers: Annotated[int, Meta(ge=1, le=1024, description="number of concurrent reconciles")] = 16
    qps: Annotated[float, Meta(ge=0.1, le=100_000, description="average API calls per second")] = 500
    burst: Annotated[int, Meta(ge=1, le=100_000, description="API calls in a burst")] = 1000
    call_timeout: Annotated[float, Meta(ge=0.5, le=600, description="timeout of an API call in seconds")] = 30
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
    lease_name: Annotated[_Name, Meta(description="Lease for leader election, in the operator's own namespace")] = (
        "ddp-operator"
    )
    lease_seconds: Annotated[
        int, Meta(ge=3, le=3600, description="seconds without a renewal until a standby becomes the leader")
    ] = 15
    identity: Annotated[
        str | None,
        Meta(description="unique identity for leader election; unset: host name and a random suffix"),
    ] = None
    pod_uid: Annotated[
        str,
        Meta(description="UID of the pod named by the identity: Kubernetes deletes the Lease with its holder's pod"),
    ] = ""
    kubeconfig: str | None = None
    """$KUBECONFIG; None: the service account of the pod, else ~/.kube/config."""
    features: dict[str, msgspec.Struct] = {}
    """The settings of features, by the name of the feature."""

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None, features: Sequence[Feature] = ()) -> Self:
        """Read the settings, also those of features, from the environment. Raises: SettingsError."""
        env = os.environ if env is None else env
        values = _read_variables(cls, env)
        own = {feature.name: _read(feature.settings, env) for feature in features if feature.settings is not None}
        return cls(kubeconfig=env.get("KUBECONFIG") or None, features=own, **values)


def _read(kind: type[msgspec.Struct], env: Mapping[str, str]) -> msgspec.Struct:
    return kind(**_read_variables(kind, env))


def _read_variables(kind: type[msgspec.Struct], env: Mapping[str, str]) -> dict[str, Any]:
    """Return the values of the variables that are set, by the name of the field. Raises: SettingsError."""
    values: dict[str, Any] = {}
    for name, (type_, text) in _describe_variables(kind).items():
        variable = f"{PREFIX}{name.upper()}"
        written = env.get(variable, "").strip()
        value: object = written
        if name == "namespaces":
            value = tuple(dict.fromkeys(filter(None, map(str.strip, written.split(",")))))
        elif name in ("log_format", "log_level"):
            value = written.lower()
        try:
            if written and get_origin(get_args(type_)[0]) is dict:
                value = msgspec.json.decode(written)
            if value:
                values[name] = msgspec.convert(value, type_, strict=False)
        except msgspec.DecodeError as error:
            problem = str(error).partition(" - at")[0].partition(", got")[0]
            problem = problem.replace("`int`", "a whole number").replace("`float`", "a number")
            raise SettingsError(f"{variable}: {written!r} is invalid: {problem}. Set it to: {text}") from None
    return values


def describe(features: Sequence[Feature] = ()) -> str:
    """Return the table of variables that ``--help`` prints."""
    kinds: list[type[msgspec.Struct]] = [
        Settings,
        *(feature.settings for feature in features if feature.settings is not None),
    ]
    variables = [item for kind in kinds for item in _describe_variables(kind).items()]
    return "\n".join(f"  {PREFIX}{name.upper():<17}  {text}" for name, (_, text) in variables)


def _describe_variables(kind: type[msgspec.Struct]) -> dict[str, tuple[object, str]]:
    """Return type and description of every setting with a ``DDP_OPERATOR_`` variable, by the name of the field."""
    variables: dict[str, tuple[object, str]] = {}
    for field in msgspec.structs.fields(kind):
        descriptions = [part.description for part in getattr(field.type, "__metadata__", ()) if part.description]
        if not descriptions:
            continue
        default = f" (default: {field.default})" if field.default not in (None, (), msgspec.NODEFAULT) else ""
        variables[field.name] = (field.type, f"{descriptions[0]}{default}")
    return variables
