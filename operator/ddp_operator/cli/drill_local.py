"""A `ddp run` in a process of its own, for `ddp drill FILE`."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Final

import yaml

from ddp_operator import constants
from ddp_operator.api.errors import InvalidManifest
from ddp_operator.api.parse import load_documents, parse_manifest
from ddp_operator.cli import probe
from ddp_operator.cli.errors import CommandError, ExitCode
from ddp_operator.cli.io import read_file
from ddp_operator.recovery import Sample, parse_sample

_POLL_SECONDS: Final = 0.1
_RUN: Final = "import sys; from ddp_operator.cli import main; sys.exit(main())"


def _with_recovery(text: str) -> str:
    """Return the file with a cluster's default restarts; `ddp run` restarts only what the file asks for."""
    try:
        job = parse_manifest(text).job
    except InvalidManifest:
        return text  # `ddp run` reports the errors
    documents = load_documents(text)
    for spec in (one["spec"] for one in documents if one.get("kind") == constants.KIND):
        limits = {"inPlaceRestarts": job.in_place_restarts, "maxRestarts": job.spec.recovery.max_restarts}
        spec["recovery"] = limits | (spec.get("recovery") or {})
    return yaml.safe_dump_all(documents)


class LocalRun:
    """A run of a job's YAML on this machine. Its output goes to stderr, up to its stop on exit."""

    def __init__(self, file: str, extra: Sequence[str]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ddp-drill-")
        self._file, self._job = file, Path(self._folder.name) / "job.yaml"
        options = ["run", str(self._job), "--plain", "--name", "drill", "--runs-dir", self._folder.name]
        options += ["--", *extra] if extra else []
        self._command = [sys.executable, "-P", "-c", _RUN, *options]
        self._process: subprocess.Popen[bytes] | None = None
        self._stopping = False

    def __enter__(self) -> LocalRun:
        self._job.write_text(_with_recovery(read_file(self._file)))
        self._process = subprocess.Popen(
            self._command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        )
        self._reader = threading.Thread(target=self._pass_on, args=(self._process.stdout,), daemon=True)
        self._reader.start()
        return self

    def _pass_on(self, output: IO[bytes]) -> None:
        with output:
            for line in output:
                if not self._stopping:  # the drill's own words come last, not those of a run that was interrupted
                    sys.stderr.write(line.decode("utf-8", "replace"))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        process = self._process
        assert process is not None
        self._stopping = process.poll() is None
        for _ in range(2):  # the second signal kills the pods at once
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                time.sleep(_POLL_SECONDS)
        process.wait()
        self._reader.join()
        self._folder.cleanup()

    def samples(self) -> Iterator[Sample]:
        """Yield pod 0's page. Raises: CommandError, once the run has ended."""
        assert self._process is not None
        while True:
            port = self._metrics_port()
            page = probe.read_page(port) if port is not None else {}
            yield parse_sample(page, time.monotonic(), self._attempt())
            if self._process.poll() is not None:
                raise CommandError("the run ended before the drill was over; its summary is above", ExitCode.FAILED)
            time.sleep(_POLL_SECONDS)

    def kill(self, rank: int) -> str:
        """Kill a rank's process among the descendants of the run."""
        assert self._process is not None
        pid = probe.kill(rank, self._process.pid)
        if not pid:
            raise CommandError(f"--kill: there is no rank {rank} in this run")
        return f"rank {rank} (process {pid})"

    def _metrics_port(self) -> int | None:
        """Return the metrics port of the newest pod 0; None before it listens."""
        files = Path(self._folder.name).glob("drill-*/pods/*/metrics-port")
        own = [file for file in files if re.search(r"-0-[a-z0-9]{5}$", file.parent.name)]
        with suppress(OSError, ValueError):
            return int(max(own, key=lambda file: file.stat().st_mtime_ns, default=Path()).read_text(encoding="utf-8"))
        return None

    def _attempt(self) -> int:
        for path in Path(self._folder.name).glob("drill-*/status.yaml"):
            status = yaml.safe_load(path.read_text(encoding="utf-8")).get("status") or {}
            return int(status.get("attempt", 1))
        return 1
