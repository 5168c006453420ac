"""Jobs on this machine: every run is a folder that contains its state."""

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from ddp_cli.client.api import Object
from ddp_cli.client.errors import ClientError, Conflict
from ddp_cli.client.logs import RunLogs
from ddp_cli.client.runs import list_runs, open_run, read_job
from ddp_cli.client.workdir import Workdir
from ddp_cli.local.adapt import Unsuitable, check_suitable
from ddp_cli.local.ending import read_summary
from ddp_cli.local.folder import DELETED, ENV_RUN_FOLDER, RunFolder
from ddp_cli.local.machine import ENV_PYTHON, find_gpus
from ddp_cli.view.why import Why, explain_why, keep_local_advice
from ddp_operator.api.cel import check_rules
from ddp_operator.api.errors import InvalidManifest
from ddp_operator.api.kubeobjects import utc_now
from ddp_operator.api.resources import count_pod_gpus
from ddp_operator.features import SCHEMA

_POLL_SECONDS: Final = 0.2
_CHANGE_SECONDS: Final = 30.0


class LocalBackend:
    """The runs in a folder. Every method raises ClientError, and NotFound if the run does not exist."""

    def __init__(self, runs: Path) -> None:
        self.runs = runs

    def folder(self, name: str | None) -> RunFolder:
        """Return a run's folder by its path, its name or its job's name; None: the newest. Raises: ClientError."""
        return open_run(name, self.runs)

    def find(self, name: str | None) -> tuple[str, Object]:
        """Return a run by its path, its name or its job's name; None: the newest. Raises: ClientError."""
        folder = self.folder(name)
        is_inside = folder.path.parent.absolute() == self.runs.absolute()
        run_name = folder.path.name if is_inside else str(folder.path)
        return run_name, read_job(folder)

    def list(self, *, everywhere: bool = False) -> Object:
        """Return the jobs of all runs, oldest first, each with the name of its run. Raises: ClientError."""
        return list_runs(self.runs)

    def create(
        self,
        text: str,
        workdir: Workdir | None,
        *,
        dry_run: bool = False,
        note: Callable[[str], None] = lambda text: None,
    ) -> tuple["LocalBackend", str, Object]:
        """Start a `ddp run` that outlives this process. Raises: ClientError."""
        if dry_run:
            raise ClientError("dry_run needs a cluster; `ddp render` checks a job without one")
        arguments = ["run", "-", "--quiet", "--runs-dir", str(self.runs)]
        if workdir is not None:
            arguments += ["--workdir", str(workdir.folder), *(["--pip"] if workdir.pip else [])]
            arguments += [f"--include={path}" for path in workdir.include]
        name, _ = self.find(_start(arguments, text))
        return self, name, read_job(self.folder(name))

    def count_gpus(self) -> int:
        """Return the number of this machine's GPUs."""
        return len(find_gpus(os.environ))

    def change(self, name: str, spec: Mapping[str, Any]) -> Object:
        """Change fields of a run's spec, and wait until its process applies them. Raises: Conflict, ClientError."""
        folder = self.folder(name)
        if not folder.in_use:
            raise _ended(name)
        job = read_job(folder)
        _check_change(job, {**job, "spec": {**job["spec"], **spec}})
        folder.add_changes(spec)

        until = time.monotonic() + _CHANGE_SECONDS
        while time.monotonic() < until and folder.in_use:
            job = read_job(folder)
            if all(job["spec"].get(field) == value for field, value in spec.items()):
                return job
            time.sleep(_POLL_SECONDS)
        if not folder.in_use:
            raise _ended(name)
        raise ClientError(
            f"{name}: its `ddp run` did not apply the change within {_CHANGE_SECONDS:.0f} s; check that the process "
            f"runs (run folder {folder.path})"
        )

    def delete(self, name: str) -> None:
        """Stop the run; its folder is deleted when its pods have ended. Raises: ClientError."""
        folder = self.folder(name)
        if folder.in_use:
            folder.add_changes({DELETED: True})
        else:
            shutil.rmtree(folder.path, ignore_errors=True)

    def is_gone(self, name: str) -> bool:
        """Return whether the run's folder is deleted."""
        return not (self.runs / name).exists()

    def follow(self, name: str, until: float) -> Iterator[Object]:
        """Yield the resource now and after every change. Raises: ClientError."""
        seen: Object = {}
        while True:
            job = read_job(self.folder(name))
            if job != seen:
                seen = job
                yield job
            if time.monotonic() >= until:
                return
            time.sleep(_POLL_SECONDS)

    def logs(self, name: str, *, node: int | None, attempt: int | None, tail: int | None) -> RunLogs:
        """Return the logs in the run's folder. Raises: ClientError."""
        return RunLogs(self.folder(name), node, attempt, tail)

    def metrics(self, name: str) -> Sequence[Mapping[str, float]]:
        """Return the rows of metrics.csv. Raises: ClientError."""
        return self.folder(name).read_rows()

    def why(self, name: str) -> Why:
        """Return the explanation; for an ended run its summary, whose remedies are for this machine."""
        folder = self.folder(name)
        why = explain_why(read_job(folder), (), utc_now())
        summary = read_summary(folder)
        if summary:
            return replace(why, what=summary, todo="", notes=())
        return keep_local_advice(replace(why, what=f"{folder.path}: {why.what}"))

    def argument(self, name: str) -> str:
        """Return the path of the run's folder, for a shell."""
        return shlex.quote(str(self.folder(name).path))


def _ended(name: str) -> Conflict:
    return Conflict(
        f"{name} has ended and cannot be changed; start a new run, which resumes from its checkpoint if any"
    )


def _check_change(old: Object, new: Object) -> None:
    """Check a changed resource as `ddp run` would check it. Raises: ClientError."""
    errors = check_rules(new, SCHEMA, old)
    if errors:
        raise ClientError(f"refused\n{InvalidManifest(errors)}")
    gpus = find_gpus(os.environ) if count_pod_gpus(new["spec"]["template"]["spec"]) else None
    try:
        check_suitable({**new, "spec": {**new["spec"], "suspend": False}}, gpus)
    except Unsuitable as error:
        raise ClientError(f"refused\n{error}") from None


def _start(arguments: Sequence[str], text: str) -> str:
    """Start `ddp` in its own session with ``text`` as input; return the path of its run folder. Raises: ClientError."""
    source, sink = os.pipe()
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "ddp_cli", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env={ENV_PYTHON: sys.executable, **os.environ, ENV_RUN_FOLDER: str(sink)},
            pass_fds=(sink,),
            start_new_session=True,
        )
        os.close(sink)
        assert process.stdin is not None
        with suppress(BrokenPipeError), process.stdin:
            process.stdin.write(text.encode())
        with open(source, encoding="utf-8") as stream:
            path = stream.read()
        if not path:
            process.wait()
            errors.seek(0)
            message = errors.read().decode(errors="replace").strip().removeprefix("ddp run: ")
            raise ClientError(message or f"`ddp run` ended with exit code {process.returncode}")
    threading.Thread(target=process.wait, daemon=True).start()
    return path
