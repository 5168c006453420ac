"""The collective operations in which the ranks of a stalled pod wait, as each rank's own thread reports them."""

import os
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any, NamedTuple

from ...base.files import read_json
from ...base.pod import Pod, WorkerRecord
from .stacks import StackFrame

COLLECTIVE_LIMIT = 100  # characters of a description
_SECONDS = 2.0  # for the reports of all ranks; less than for their stacks, which are collected meanwhile
_NAME = re.compile(r"[\w .:<>-]{1,48}")
_CALL_NAME = re.compile(r"[\w.<>]{1,100}")
_TEXT_LIMIT = 400  # characters, of a path or a documentation
_SENTENCE_LIMIT = 120
_MOST_PATHS = 8
_PATH_LIMIT = 120  # characters
_DEFAULT_GROUP = "default_pg"
_UNNAMED_GROUP = "undefined"


class Collective(NamedTuple):
    """One operation. ``sequence``: its number in its group, from 1; ``sizes``: of its inputs, one text for each."""

    operation: str
    sequence: int
    group: str
    sizes: Sequence[str]

    @property
    def name(self) -> str:
        """Operation, number and group, as in ``all_reduce 57 of the default group``."""
        return f"{self.operation} {self.sequence} of {self.group}"

    @property
    def text(self) -> str:
        """The name, with the shapes of the inputs."""
        shapes = f", shape {', '.join(self.sizes)}" if self.sizes else ""
        return f"{self.name}{shapes}"[:COLLECTIVE_LIMIT]


class GroupState(NamedTuple):
    """A process group in one rank. ``last``: the operation that the rank has called last; ``pending``: not ended."""

    last: Collective
    pending: Collective | None


class LibraryCall(NamedTuple):
    """A function of a library in which the main thread is, and its documentation; empty if it is unknown."""

    path: str = ""
    function: str = ""
    name: str = ""
    documentation: str = ""

    @property
    def summary(self) -> str:
        """The name and the first sentence of the documentation."""
        sentence = self.documentation.partition(". ")[0].rstrip(".")
        return f"{self.name}: {sentence[:_SENTENCE_LIMIT]}" if sentence else ""


class RankCollectives(NamedTuple):
    """The process groups of a rank, the last used one first; empty if the rank reports none.

    ``awaited``: the coroutines for which its event loop waits, the outermost first; ``call``: of a library;
    ``paths``: of files, by the names that they have where the script waits.
    """

    groups: Sequence[GroupState] = ()
    awaited: Sequence[StackFrame] = ()
    call: LibraryCall = LibraryCall()
    paths: Mapping[str, str] = MappingProxyType({})

    @property
    def pending(self) -> Collective | None:
        """The operation in which the rank waits; None if all have ended."""
        return next((group.pending for group in self.groups if group.pending is not None), None)

    @property
    def are_over(self) -> bool:
        """Whether the rank reports its operations, and all have ended."""
        return bool(self.groups) and self.pending is None

    @property
    def last(self) -> Collective | None:
        """The operation that the rank has called last."""
        return self.groups[0].last if self.groups else None


class CollectivesRequest:
    """A request to the ranks, which respond while the launcher collects their stacks."""

    def __init__(self, pod: Pod, workers: Sequence[WorkerRecord]) -> None:
        start = time.monotonic()
        self._deadline = start + _SECONDS
        self._request = f"{start!r}\n"
        paths = {worker.local_rank: _find_pipe(pod, worker) for worker in workers}
        self._paths = {rank: path for rank, path in paths.items() if _write_request(path, self._request)}

    def read(self) -> dict[int, RankCollectives]:
        """Return the reports by local rank, at most two seconds after the request; without silent ranks."""
        reports: dict[int, RankCollectives] = {}
        while True:
            for rank in set(self._paths) - set(reports):
                report = read_json(f"{self._paths[rank]}.json")
                if report.get("request") == self._request:
                    reports[rank] = parse_report(report)
            if len(reports) == len(self._paths) or time.monotonic() > self._deadline:
                return reports
            time.sleep(0.02)


def _find_pipe(pod: Pod, worker: WorkerRecord) -> str:
    return os.path.join(pod.runtime, "groups", f"{worker.local_rank}.collectives")


def _write_request(path: str, request: str) -> bool:
    """Wake a rank's thread. Returns whether it has one."""
    with suppress(OSError):  # no pipe, or nobody reads it
        pipe = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        try:
            return os.write(pipe, request.encode()) > 0
        finally:
            os.close(pipe)
    return False


def parse_report(report: Mapping[str, Any]) -> RankCollectives:
    """Return a rank's report, to which the user's process can write anything; empty if it is invalid."""
    try:
        groups = [_parse_group(raw) for raw in report["groups"][:8]]
        awaited = [StackFrame(str(path), int(line), str(name)) for path, line, name in report.get("awaited", ())[:32]]
        return RankCollectives(
            groups, awaited, _parse_call(report.get("call", ())), _parse_paths(report.get("paths", {}))
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return RankCollectives()


def _parse_call(raw: Sequence[Any]) -> LibraryCall:
    """Return a library's call; empty without one. Raises: TypeError."""
    texts = [str(text)[:_TEXT_LIMIT] for text in raw[:4]]
    is_valid = len(texts) == 4 and all(map(str.isprintable, texts)) and _CALL_NAME.fullmatch(texts[2])
    return LibraryCall(*texts) if is_valid else LibraryCall()


def _parse_paths(raw: Mapping[str, Any]) -> dict[str, str]:
    """Return printable paths. Raises: AttributeError."""
    paths = [(name, path) for name, path in list(raw.items())[:_MOST_PATHS] if isinstance(path, str)]
    return {name: path for name, path in paths if path.isprintable() and len(path) <= _PATH_LIMIT}


def _parse_group(raw: Mapping[str, Any]) -> GroupState:
    last = _parse_collective(raw["last"], str(raw["name"]))
    pending = raw["pending"]
    return GroupState(last, None if pending is None else _parse_collective(pending, str(raw["name"])))


def _parse_collective(raw: Mapping[str, Any], name: str) -> Collective:
    """Return an operation. Raises: KeyError, TypeError, ValueError."""
    description = raw["group"]
    group = f"group {name if description == _UNNAMED_GROUP else description}"
    if description == _DEFAULT_GROUP:
        group = "the default group"
    sizes = [f"[{', '.join(str(int(number)) for number in size)}]" for size in raw["sizes"][:4]]
    collective = Collective(raw["operation"], int(raw["sequence"]), group, sizes)
    if not (_NAME.fullmatch(collective.operation) and _NAME.fullmatch(collective.group)):
        raise ValueError(collective)
    return collective
