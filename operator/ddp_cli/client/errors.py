"""Errors and warnings of the client. Their text states what happened and what to do; `ddp` prints it unchanged."""

import warnings
from collections.abc import Iterable

from ddp_operator.api.errors import FieldError
from ddp_operator.api.status import Status
from ddp_operator.api.stored_fields import describe_left_out


class ClientError(Exception):
    """The operation failed; nothing was changed."""


class NotFound(ClientError):
    """The job, run or log does not exist."""


class Conflict(ClientError):
    """The job's state does not allow the operation: it has ended, or its name is in use."""


class NameInUse(Conflict):
    """Another job has the name."""

    def __init__(self, message: str, name: str, namespace: str) -> None:
        super().__init__(message)
        self.name = name
        self.namespace = namespace


class ApiError(ClientError):
    """The cluster is unreachable (``status`` is None), or responded with this HTTP status."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class TrainingFailed(ClientError):
    """The job has ended without success.

    ``category`` is that of the failure (UserError, OOM, NodeLost, …); if no pod failed, the job's reason.
    """

    def __init__(self, explanation: str, status: Status) -> None:
        self.status = status
        self.failure = failure = status.last_failure
        self.category = failure.category if failure else status.reason
        self.message = failure.message if failure else explanation
        self.rank = failure.rank if failure else None
        self.traceback = failure.traceback if failure else ""
        shown = self.traceback if self.traceback and self.traceback.strip() not in explanation else ""
        super().__init__("\n\n".join(filter(None, (explanation, shown.rstrip()))))


class FieldsLeftOut(UserWarning):
    """Fields of a stored status cannot be read; the others are shown. Python prints an equal text once."""


class DeprecatedField(FutureWarning):
    """A field of a job or its profile has a new form, which is used. Python prints an equal text once."""


def warn_of_deprecated(fields: Iterable[FieldError]) -> None:
    """Warn of fields, each with what to write instead."""
    for field in fields:
        warnings.warn(f"warning: {field}", DeprecatedField, stacklevel=2)


def warn_of_left_out(name: str, paths: tuple[str, ...]) -> None:
    """Warn of fields that cannot be read, if there are any. ``name``: of the job or the file."""
    if paths:
        warnings.warn(f"{name}: {describe_left_out(paths)}", FieldsLeftOut, stacklevel=2)
