"""Where jobs are made and found."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Literal

from ddp_operator.client.backend import Backend
from ddp_operator.client.job import Job


class Client:
    """Training jobs in a cluster, or on this machine.

    ``namespace``, ``context`` and ``kubeconfig`` are as kubectl has them; it logs in when it is first used.
    ``backend``: ``local`` runs jobs on this machine, each in a folder of its own in ``runs_dir``.
    """

    def __init__(
        self,
        *,
        backend: Literal["cluster", "local"] = "cluster",
        namespace: str | None = None,
        context: str | None = None,
        kubeconfig: str | None = None,
        runs_dir: str | Path = "ddp-runs",
    ) -> None:
        self._kind = backend
        self._login = {"namespace": namespace, "context": context, "kubeconfig": kubeconfig}
        self._runs = Path(runs_dir)

    @cached_property
    def backend(self) -> Backend:
        """What runs the jobs. Raises: ClientError, where no cluster is configured."""
        if self._kind == "local":
            from ddp_operator.client.local import LocalBackend

            return LocalBackend(self._runs)
        from ddp_operator.client.api import connect
        from ddp_operator.client.cluster import ClusterBackend

        return ClusterBackend(connect(**self._login))

    def get(self, name: str | None = None) -> Job:
        """Return a job by its name; on this machine also by its run's name or folder, and the newest without any.

        Raises: NotFound, ClientError.
        """
        own, resource = self.backend.find(name)
        return Job(self.backend, own, resource)

    def list(self) -> Sequence[Job]:
        """Return the jobs of the namespace, or the runs on this machine, oldest first. Raises: ClientError."""
        items = self.backend.list()["items"]
        return [Job(self.backend, item["metadata"]["name"], item) for item in items]
