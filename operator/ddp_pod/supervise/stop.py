"""The deadlines of a pod that was asked to stop.

``spec.checkpoint.graceSeconds`` is the time of the workers (``DDP_GRACE_SECONDS``, ``Pod.grace``). The operator's
``manifests/pod`` adds 30 s for the launcher to the pod's ``terminationGracePeriodSeconds``, or shortens the time of the
workers if the template sets that. SIGTERM starts both: ``Supervisor._enforce_stop`` kills the workers at
``of_workers``, and what saves and uploads afterwards ends by ``of_pod``. If a peer was asked to stop, or no pod was,
the agent has limits of its own (``agent._stop_ranks``).
"""

import time

_SECONDS_AFTER_GRACE = 30.0  # by which the pod's grace period is longer than the workers', or a quarter of the whole


class StopDeadlines:
    """The ends of the workers and of the pod's own work, by the monotonic clock; None: no stop signal was handled.

    ``grace``: the seconds of the workers.
    """

    def __init__(self, grace: float) -> None:
        self._grace = grace
        self._signalled_at: float | None = None
        self.of_workers: float | None = None
        self.of_pod: float | None = None  # before the kubelet kills it

    def note_signal(self) -> None:
        """Note when the first signal arrived. A signal handler calls this: the signal may be handled seconds later."""
        if self._signalled_at is None:
            self._signalled_at = time.monotonic()

    def begin(self) -> None:
        """Set the deadlines within the pod's grace period, from the signal on."""
        began = time.monotonic() if self._signalled_at is None else self._signalled_at
        # Of the launcher's own time a sixth lets ranks end that have just saved, a third is for uploads and the report,
        # and half is left for a busy node.
        reserve = min(_SECONDS_AFTER_GRACE, max(0.0, self._grace / 3 - 1))
        self.of_workers = began + self._grace + reserve / 6
        self.of_pod = began + self._grace + reserve / 2
