"""The DDP operator: one ``DDPTrainingJob`` becomes a headless Service and an Indexed Job of torchrun pods.

For scripts and notebooks: ``from ddp_operator import Client`` (docs/python.md). The names below are imported at their
first use, because the operator does not need them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from ddp_operator._version import __version__ as __version__

if TYPE_CHECKING:
    from ddp_operator.api.status import Progress, Status
    from ddp_operator.client.client import Client
    from ddp_operator.client.errors import ApiError, ClientError, Conflict, NotFound, TrainingFailed
    from ddp_operator.client.job import Job

_HOMES: Final = {
    "Progress": "api.status",
    "Status": "api.status",
    "Client": "client.client",
    "Job": "client.job",
    **dict.fromkeys(("ApiError", "ClientError", "Conflict", "NotFound", "TrainingFailed"), "client.errors"),
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
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
