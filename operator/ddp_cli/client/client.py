"""Create and find jobs."""

import os
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ddp_cli.client.errors import ClientError
from ddp_cli.client.functions import check_arguments, find_function
from ddp_cli.client.job import Job
from ddp_cli.client.program import IMAGE, build_job, job_name
from ddp_cli.client.workdir import Workdir, check_folder, default_folder
from ddp_operator.api.yaml_writer import format_documents

if TYPE_CHECKING:
    from ddp_cli.client.job import Backend


class Client:
    """Training jobs in a cluster, or on this machine.

    ``namespace``, ``context`` and ``kubeconfig`` are those of kubectl; the client logs in on first use.
    ``backend``: ``local`` runs jobs on this machine, each in its own folder in ``runs_dir``.
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
    def backend(self) -> "Backend":
        """The cluster or machine that runs the jobs. Raises: ClientError, if no cluster is configured."""
        if self._kind == "local":
            from ddp_cli.client.local import LocalBackend

            return LocalBackend(self._runs)
        from ddp_cli.client.api import connect
        from ddp_cli.client.cluster_backend import ClusterBackend

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
        checkpoint_claim: str | None = None,
        spec: Mapping[str, Any] | None = None,
        name: str | None = None,
    ) -> Job:
        """Run a script or a function in each of ``nodes`` x ``procs`` processes, and return the job at once.

        Each rank calls a function with ``args`` by name, which must be plain data; its module's folder is packed. A
        script gets ``args`` as its command line; the current folder is packed, or the script's if that is elsewhere.

        ``procs``: ranks per pod; auto: one for each GPU, else one; cpu: one for each of ``cpus``. ``gpus``: per pod;
        default: one in a cluster, all GPUs on this machine. ``cpus``: the CPU limit of each pod. ``image`` contains
        Python and PyTorch; on this machine, this Python is used. ``workdir``: the folder to pack, by git's rules;
        ``include``: further paths of it; ``pip``: install its requirements.txt. ``code_claim``: store the packed folder
        on this claim instead of a ConfigMap. ``checkpoint_claim``: a claim for checkpoints, at DDP_CHECKPOINT_DIR.
        ``spec``: other fields of the spec.

        Raises: TypeError, if arguments are not plain data or do not match the function; Conflict, if the name is in
        use; ClientError.
        """
        if os.environ.get("TORCHELASTIC_RUN_ID"):
            raise ClientError(
                'a rank called train() when it imported this module; put the call under `if __name__ == "__main__":`'
            )
        if procs == "cpu" and not cpus and "template" not in (spec or {}):
            raise ClientError('procs="cpu" starts a rank for each CPU of a pod; set cpus, such as cpus=4')
        chosen_folder = Path(workdir) if workdir is not None else None
        if callable(program):
            prepared = _prepare_function(program, args, chosen_folder)
        else:
            prepared = _prepare_script(program, args, chosen_folder)
        job = build_job(
            name or job_name(prepared.stem),
            prepared.command,
            nodes=nodes,
            procs=procs,
            gpus=self._share_gpus(nodes, procs) if gpus is None else gpus,
            cpus=cpus,
            image=image,
            env=env or {},
            checkpoint_claim=checkpoint_claim,
            spec=spec or {},
        )
        return self.submit(job, workdir=prepared.folder, include=include, pip=pip, code_claim=code_claim)

    def submit(
        self,
        manifest: str | Path | Mapping[str, Any],
        *,
        workdir: str | Path | None = None,
        include: Sequence[str] = (),
        pip: bool = False,
        code_claim: str | None = None,
        dry_run: bool = False,
        note: Callable[[str], None] = lambda text: None,
    ) -> Job:
        """Create the job of a YAML file, of YAML text or of a dict, with the file's other objects, and return it.

        ``workdir``, ``include``, ``pip``, ``code_claim``: as in `train`; default: no folder.
        ``dry_run``: create nothing; the API server only checks the job. ``note`` receives a line per other object.

        Raises: Conflict, ClientError.
        """
        if isinstance(manifest, Mapping):
            text = format_documents([manifest])
        elif isinstance(manifest, str) and "\n" in manifest:
            text = manifest
        else:
            try:
                text = Path(manifest).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ClientError(f"{manifest}: {error}; pass the path of a job's YAML") from None
        folder = Workdir(Path(workdir), include, pip, code_claim) if workdir is not None else None
        return Job(*self.backend.create(text, folder, dry_run=dry_run, note=note))

    def _share_gpus(self, nodes: int, procs: int | str) -> int:
        """Return the GPUs of each pod: at least one if there are any, so more pods than GPUs are refused."""
        available = self.backend.count_gpus()
        if procs == "cpu" or available == 0:
            return 0
        share = 1 if available is None else max(available // nodes, 1)
        return min(share, procs) if isinstance(procs, int) else share

    def get(self, name: str | None = None) -> Job:
        """Return a job by its name. On this machine: by the job's or run's name, the run's folder, or the newest run.

        Raises: NotFound, ClientError.
        """
        backend_name, resource = self.backend.find(name)
        return Job(self.backend, backend_name, resource)

    def list(self) -> Sequence[Job]:
        """Return the jobs of the namespace, or the runs on this machine, oldest first. Raises: ClientError."""
        items = self.backend.list()["items"]
        return [Job(self.backend, item["metadata"]["name"], item) for item in items]


class _Program(NamedTuple):
    """A job's command, the folder to pack, and the stem of the job's name."""

    command: Sequence[str]
    folder: Path
    stem: str


def _prepare_function(
    program: Callable[..., object], args: Sequence[object] | Mapping[str, Any], workdir: Path | None
) -> _Program:
    """Return the command that calls a function. Raises: TypeError, ClientError."""
    function = find_function(program)
    if not isinstance(args, Mapping) and args:
        raise TypeError("args: pass a function's arguments by name, in a dict")
    arguments = dict(args) if isinstance(args, Mapping) else {}
    check_arguments(function, arguments)
    folder = workdir or check_folder(function.root)
    return _Program(function.build_command(arguments, folder), folder, function.name.rpartition(".")[2])


def _prepare_script(program: str | Path, args: Sequence[object] | Mapping[str, Any], workdir: Path | None) -> _Program:
    """Return the command that runs a script. Raises: TypeError, ClientError."""
    if isinstance(args, Mapping):
        raise TypeError("args: pass a script's arguments as a list, such as ['--epochs', 3]")
    if not Path(program).is_file():
        raise ClientError(f"{program}: the script does not exist; pass the path of a Python file")
    folder = workdir or default_folder(str(program))
    command = ["python3", Workdir(folder).place(str(program)), *map(str, args)]
    return _Program(command, folder, Path(program).stem)
