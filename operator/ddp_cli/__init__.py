"""Commands, Python API and local runs of the DDP operator, for laptops and CI.

For scripts and notebooks: ``from ddp_cli import Client`` (docs/python.md). The names below are imported at their first
use, because a command needs few of them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from ddp_cli.client.client import Client
    from ddp_cli.client.errors import ApiError, ClientError, Conflict, NotFound, TrainingFailed
    from ddp_cli.client.job import Job
    from ddp_operator.api.status import Progress, Status

_HOMES: Final = {
    **dict.fromkeys(("Progress", "Status"), "ddp_operator.api.status"),
    "Client": "ddp_cli.client.client",
    "Job": "ddp_cli.client.job",
    **dict.fromkeys(("ApiError", "ClientError", "Conflict", "NotFound", "TrainingFailed"), "ddp_cli.client.errors"),
}
__all__ = [
    "ApiError",
    "Client",
    "ClientError",
    "Conflict",
    "Job",
    "NotFound",
    "Progress",
    "Status",
    "TrainingFailed",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ddp_cli.client.hooks import use_features
    from ddp_cli.features import FEATURES

    use_features(FEATURES)
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
