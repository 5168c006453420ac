"""Text that `ddp run` prints beside the job's state: the pods' logs, what the job waits for, and a hint."""

import asyncio
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, NamedTuple

from ddp_cli.view.why import name_stragglers
from ddp_operator.api.status import Status
from ddp_operator.decide import conditions as c
from ddp_operator.decide import doubts
from ddp_operator.decide.input_texts import describe_inputs
from ddp_operator.decide.report import Page
from ddp_operator.reading.parts import read_report_part
from ddp_pod.contract.plain_files import open_plain

_EVERY_SECONDS: Final = 0.2
_BAR_SECONDS: Final = 5.0  # interval at which the state of a script's own progress bar is printed
_CHUNK: Final = 1 << 20
_LONGEST_LINE: Final = 1 << 16  # bytes
# The prefixes of the launcher for a rank, and of torchrun --tee for a local rank.
_RANK: Final = re.compile(r"\[rank(\d{1,9})\]: ?")
_LOCAL_RANK: Final = re.compile(r"\[[A-Za-z_]+(\d{1,9})\]: ?")
_LOG: Final = re.compile(r"attempt-(\d{1,9})-pod-(\d{1,9})\.log")


class LogFile(NamedTuple):
    """The log of a pod (``node``: its index) in an attempt."""

    attempt: int
    node: int
    path: Path


def find_logs(folder: Path) -> list[LogFile]:
    """Return the files in a run's folder of logs, by attempt and pod."""
    matches = ((_LOG.fullmatch(path.name), path) for path in folder.glob("*.log"))
    return sorted(LogFile(int(match[1]), int(match[2]), path) for match, path in matches if match)


class Tail:
    """Calls ``on_line`` with the complete lines of growing files."""

    def __init__(
        self,
        files: Callable[[], Iterable[LogFile]],
        on_line: Callable[[LogFile, str], None],
        open_file: Callable[[str, int], int] = open_plain,
    ) -> None:
        self._files = files
        self._open_file = open_file
        self._on_line = on_line
        self._read: dict[LogFile, tuple[int, bytes]] = {}
        self._last = time.monotonic()

    async def run(self) -> None:
        """Follow until cancelled."""
        while True:
            self.read()
            await asyncio.sleep(_EVERY_SECONDS)

    def skip_to(self, file: LogFile, offset: int) -> None:
        """Read a file from this offset on."""
        self._read[file] = (offset, b"")

    def read(self) -> None:
        """Read the lines written since the last call."""
        for file in self._files():
            while self.read_chunk(file):
                pass

    def read_chunk(self, file: LogFile) -> bool:
        """Read the next lines of a file; return whether there are more. A line without end is divided."""
        offset, rest = self._read.get(file, (0, b""))
        try:
            with open(file.path, "rb", opener=self._open_file) as stream:
                stream.seek(offset)
                data = stream.read(_CHUNK)
        except OSError:
            return False
        *lines, rest = (rest + data).split(b"\n")
        is_bar = b"\r" in rest and time.monotonic() - self._last >= _BAR_SECONDS
        if is_bar or len(rest) > _LONGEST_LINE:
            lines = [*lines, rest]
            rest = b""
        self._last = time.monotonic() if lines else self._last
        self._read[file] = offset + len(data), rest
        for line in lines:
            self._on_line(file, line.decode("utf-8", "replace"))
        return bool(data)


def split_rank(line: str, node: int, procs: int) -> tuple[int | None, str]:
    """Return the rank that wrote a line of a pod's log, None if unknown, and the line without the rank's prefix.

    A script's progress bar redraws itself with carriage returns: only its last state is returned.
    """
    rank = node if procs == 1 else None
    start = 0
    if match := _RANK.match(line):
        rank = int(match[1])
        start = match.end()
    elif (match := _LOCAL_RANK.match(line)) and int(match[1]) < procs:
        rank = node * procs + int(match[1])
        start = match.end()
    return rank, line[start:].rstrip("\r").rpartition("\r")[2]


_LOADING: Final = {
    "": "importing torch",
    "Starting": "importing torch",
    "WaitingForMaster": "waiting for all pods",
    "Rendezvous": "connecting",
}
# In a pod with one rank, the lines of the launcher and of torchrun have no prefix of a rank.
_NOT_THE_SCRIPT: Final = re.compile(r"\[launcher\] |[IWE]\d{4} .* torch/distributed/elastic/")


def describe_wait(status: Status, page: Page, processes: int, *, spoken: bool) -> str:
    """Return in one line what the job waits for, empty for nothing. ``spoken``: the script has printed a line."""
    inputs = read_report_part(page, "inputs").inputs
    if inputs and status.condition(c.INPUTS_READY) and not status.is_true(c.INPUTS_READY):
        return describe_inputs(inputs)  # newer than the status
    for kind, waiting_status in (
        ("Accepted", "False"),
        ("InputsReady", "False"),
        ("Restarting", "True"),
        ("Scheduled", "False"),
        ("Rendezvoused", "False"),
        ("TrainsAsOne", "False"),
        ("Progressing", "False"),
    ):
        condition = status.condition(kind)
        if condition is not None and condition.status == waiting_status and condition.message:
            if kind == c.TRAINS_AS_ONE and condition.reason != doubts.WAITING_FOR_GROUP:
                continue  # they train, but not together
            if condition.reason == c.NO_STEP_YET:
                continue  # for the same reason as Rendezvoused, whose status may be older
            if condition.reason != c.WAITING_FOR_WORKERS or page.restarts:
                return condition.message.splitlines()[0]
            loading = "" if page.training else _LOADING.get(page.phase, "")  # the status may be older
            if loading:
                return f"starting {count(processes, 'process', 'es')}: {loading} …"
    if page.restarts and not page.training and status.progress is not None:
        return "restarted in the same pods; no step since"
    has_step = status.progress is not None or page.training
    if page.stall.awaited:
        return page.stall.awaited
    slow = name_stragglers(status) if page.training else ""
    if slow:
        return slow
    return "" if spoken or has_step else f"{count(processes, 'process', 'es')} started; no output of the script yet"


def format_line(line: str, file: LogFile, procs: int, ranks: str) -> str | None:
    """Return a line of a pod's log for display, None to omit it. ``ranks``: all, or the number of a rank."""
    rank, text = split_rank(line, file.node, procs)
    if ranks == "all":
        return f"[{f'pod {file.node}' if rank is None else f'rank {rank}'}] {text}"
    return text if str(rank) == ranks and not _NOT_THE_SCRIPT.match(text) else None


def count(number: int, noun: str, plural: str = "s") -> str:
    """Return a number with a noun: 1 pod, 2 pods."""
    return f"{number} {noun}{plural if number != 1 else ''}"
