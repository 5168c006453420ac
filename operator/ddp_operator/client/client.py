"""Where jobs are made and found."""

import os
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import yaml

from ddp_operator.client.backend import Backend
from ddp_operator.client.errors import ClientError
from ddp_operator.client.functions import check_arguments, find_function
from ddp_operator.client.job import Job
from ddp_operator.client.program import IMAGE, build_job, job_name
from ddp_operator.client.workdir import Workdir, check_folder, default_folder


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

    def train(
        self,
        program: str | Path | Callable[..., object],
        *,
        nodes: int = 1,
        procs: Literal["auto", "gpu", "cpu"] | int = "auto",
        gpus: int | None = None,
        cpus: int | None = None,
        image: str = IMAGE,
        args: Sequence[object] | Mapping[str, Any] = (),
        env: Mapping[str, str] | None = None,
        workdir: str | Path | None = None,
        include: Sequence[str] = (),
        pip: bool = False,
        code_claim: str | None = None,
        code_image: str | None = None,
        checkpoint_claim: str | None = None,
        spec: Mapping[str, Any] | None = None,
        name: str | None = None,
    ) -> Job:
        """Train with a script, or a function, in each of ``nodes`` x ``procs`` processes, and return the job at once.

        A function is called in each rank with ``args`` by name, which are plain data; its module's folder travels. A
        script gets ``args`` as its words; the current folder travels, or its own where it is outside of that.

        ``procs``: ranks of a pod; auto: one for each GPU, or one; cpu: one for each of ``cpus``. ``gpus``: of each pod;
        by default one in a cluster, and here those that there are. ``cpus``: the limit of each pod. ``image`` has
        Python and PyTorch; on this machine it is this Python. ``workdir``: the folder that travels, as git would take
        it, with ``include`` though it is ignored; ``pip``: its requirements.txt is installed; ``code_claim``: a claim
        by which it travels, where a ConfigMap is too small, or ``code_image``: a repository of a registry, with a tag
        or without, where the cluster has image volumes. ``checkpoint_claim``: a claim for checkpoints, at
        DDP_CHECKPOINT_DIR. ``spec``: any other fields of the spec.

        Raises: TypeError, where arguments are not plain data or not those of the function; Conflict, where there is a
        job of that name; ClientError.
        """
        if os.environ.get("TORCHELASTIC_RUN_ID"):
            raise ClientError(
                "train() was called in a rank, where this module was imported: put the call under "
                '`if __name__ == "__main__":`'
            )
        if procs == "cpu" and not cpus and "template" not in (spec or {}):
            raise ClientError('procs="cpu" is a rank for each CPU of a pod: say how many, such as cpus=4')
        if callable(program):
            called = find_function(program)
            if not isinstance(args, Mapping) and args:
                raise TypeError("args: a function's arguments are given by name, in a dict")
            given = dict(args) if isinstance(args, Mapping) else {}
            check_arguments(called, given)
            folder = Path(workdir) if workdir is not None else check_folder(called.root)
            command, stem = called.build_command(given, folder), called.name.rpartition(".")[2]
        else:
            if isinstance(args, Mapping):
                raise TypeError("args: a script's arguments are a list of words, such as ['--epochs', 3]")
            if not Path(program).is_file():
                raise ClientError(f"{program}: there is no such script")
            folder = Path(workdir) if workdir is not None else default_folder(str(program))
            command = ["python3", Workdir(folder).place(str(program)), *map(str, args)]
            stem = Path(program).stem
        job = build_job(
            name or job_name(stem),
            command,
            nodes=nodes,
            procs=procs,
            gpus=self._share_gpus(nodes, procs) if gpus is None else gpus,
            cpus=cpus,
            image=image,
            env=env or {},
            checkpoint_claim=checkpoint_claim,
            spec=spec or {},
        )
        return self.submit(job, workdir=folder, include=include, pip=pip, code_claim=code_claim, code_image=code_image)

    def submit(
        self,
        manifest: str | Path | Mapping[str, Any],
        *,
        workdir: str | Path | None = None,
        include: Sequence[str] = (),
        pip: bool = False,
        code_claim: str | None = None,
        code_image: str | None = None,
        dry_run: bool = False,
        note: Callable[[str], None] = lambda words: None,
    ) -> Job:
        """Create the job of a YAML file, of its text or of a dict, with what else the file has, and return it.

        ``workdir``, ``include``, ``pip``, ``code_claim``, ``code_image``: as in `train`; by default no folder travels.
        ``dry_run``: the API server only checks it. ``note`` is told of what was made beside it.

        Raises: Conflict, ClientError.
        """
        if isinstance(manifest, Mapping):
            text = yaml.safe_dump(dict(manifest), sort_keys=False, allow_unicode=True)
        elif isinstance(manifest, str) and "\n" in manifest:
            text = manifest
        else:
            try:
                text = Path(manifest).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ClientError(f"{manifest}: {error}; give the path of a job's YAML") from None
        folder = Workdir(Path(workdir), include, pip, code_claim, code_image) if workdir is not None else None
        return Job(*self.backend.create(text, folder, dry_run=dry_run, note=note))

    def _share_gpus(self, nodes: int, procs: int | str) -> int:
        """Return the GPUs of each pod: more pods than GPUs are refused, and not trained on CPUs."""
        found = self.backend.count_gpus()
        if procs == "cpu" or found == 0:
            return 0
        share = 1 if found is None else max(found // nodes, 1)
        return min(share, procs) if isinstance(procs, int) else share

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
