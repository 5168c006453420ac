"""What can go wrong, each as an exception whose text says what happened and what to do: `ddp` prints it as it is."""

from ddp_operator.api.status import Status


class ClientError(Exception):
    """What was asked for cannot be done; nothing was changed."""


class NotFound(ClientError):
    """There is no job, no run or no log of that name."""


class Conflict(ClientError):
    """The job's state does not allow it: it has ended, or there is one of that name already."""


class ApiError(ClientError):
    """The cluster cannot be reached (``status`` is None), or answered with this HTTP status."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class TrainingFailed(ClientError):
    """The job has ended and has not succeeded: what failed, and where.

    ``category`` is the failure's (UserError, OutOfMemory, NodeLost, …) or, where no pod failed, the reason of the end.
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
