"""Ranks that exited with 0: whether a traceback ends their output, their processes still ran, or steps are missing.

A shell's ``|``, ``&`` and ``|| true``, and a script that catches and prints its exception, hide the exit code.
"""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from ..base.exceptions import MESSAGE_PART, RANK_PREFIX
from ..base.files import read_json
from ..base.pod import Pod, WorkerRecord, list_workers
from ..base.runtime_files import ENDING
from ..contract.failure_record import MOST_RANK_ENDS, RANK_END_TEXT, RankEnd
from ..contract.processes import name_command, process_state
from ..progress.output_ends import read_end, read_last_lines
from ..progress.rank_progress import RankReader, find_missing_steps
from .rules import WorkerEnd, classify

_HEADER: Final = re.compile(r"(?P<kind>Traceback|Stack) \(most recent call last\)")
# A frame as Python, loguru and rich print it, and other lines of a traceback.
_FRAME: Final = re.compile(r'[\s>|]*File "[^"]+", line \d+|\s*│ \S+:\d+ in ')
_IN_TRACEBACK: Final = re.compile(r"\s|$|> File |[│╭╰]")
_EXCEPTION: Final = re.compile(r"(?P<type>[A-Za-z_][\w.]*)(?:: ?(?P<message>.*))?$")
_ERROR_NAME: Final = re.compile(r"(?:Error|Exception|Interrupt|Exit)$")
# What precedes the traceback of a warning, and of an exception that Python ignores.
_HARMLESS: Final = re.compile(r":\d+: \w*Warning: |^Exception ignored ")
# Lines after a traceback that are part of its message, or that libraries and the interpreter print at the end of a
# process, such as progress bars that have stopped.
_AFTERWARDS: Final = re.compile(
    r"\s|$|[│╰+-]+$|CUDA kernel errors|For debugging consider|Compile with `TORCH_USE|Search for `cuda|wandb: |\[W\d"
    r"|Exception ignored |.*\w:\d+: \w*Warning: |.*\b(?!100%)\d+%\|"
)
# The lines with which threading, and multiprocessing in a child, begin the report of an exception that nobody caught.
_ORIGIN: Final = re.compile(
    r"^Exception in thread (?P<thread>[^:\n]{1,80}?)( \(.*\))?:|^(?P<process>Process [\w:-]{1,80}):"
)
# The first frame of the thread that sends what a process puts into a multiprocessing queue; it reports and drops it.
_FEEDER: Final = re.compile(r'\s*File "[^"]*multiprocessing[/\\]queues\.py", line \d+, in _feed$')
# The first frame of a thread that an exception has ended, also if other output has torn the line with its name.
_THREAD: Final = re.compile(r'\s*File "[^"]*threading\.py", line \d+, in _bootstrap_inner$')
# Among the first frames of a process that multiprocessing has spawned, and that has not run its target yet.
_SPAWN: Final = re.compile(r'\s*File "[^"]*multiprocessing[/\\]spawn\.py", line \d+, in spawn_main$')
_GROUP_PREFIX: Final = re.compile(r"^  \| ?")  # of the lines of an ExceptionGroup
_QUOTE: Final = re.compile(r'(?<!\\)"')
_ENVIRONMENT_BYTES: Final = 1 << 17
_MOST_TRACEBACKS: Final = 4  # of a rank itself, after that of its helper
_MOST_PROCESSES: Final = 2  # in a record
# Helpers of PyTorch and multiprocessing that end by themselves, shortly after the process that they serve.
_HELPERS: Final = re.compile(r"torch_shm_manager\b|multiprocessing\.(resource_tracker|forkserver)\b")


class PrintedTraceback(NamedTuple):
    """The last traceback in a rank's output. ``is_last``: whether no output of the script follows it.

    ``origin``: the thread or the process that it ended, as ``thread prefetch``; empty: it may have been handled.
    """

    exception_type: str
    message: str
    is_last: bool
    origin: str = ""

    @property
    def is_thread(self) -> bool:
        """Whether it ended a thread of the rank's own process."""
        return self.origin.startswith("thread ")

    @property
    def text(self) -> str:
        """The exception as Python prints it."""
        return ": ".join(filter(None, (self.exception_type, self.message)))


class RemainingProcess(NamedTuple):
    """A process that a rank's program has started, and that still runs after its end. ``command``: no arguments."""

    pid: int
    command: str


def find_printed_traceback(output: str) -> PrintedTraceback | None:
    """Return the last traceback in the end of a rank's output; None if there is none, or if a warning shows it."""
    lines = [_GROUP_PREFIX.sub("", RANK_PREFIX.sub("", line)).rstrip() for line in output.splitlines()]
    matches = ((number, _HEADER.search(line)) for number, line in reversed(list(enumerate(lines))))
    number, header = next(((number, match) for number, match in matches if match), (0, None))
    if header is None:  # the output begins within the traceback
        found = _read_traceback(lines[next((n for n, line in enumerate(lines) if _FRAME.match(line)), 0) :])
        return found if found is not None and _ERROR_NAME.search(found.exception_type) else None

    start = header.start()
    before = [*lines[max(0, number - 1) : number], header.string[:start]]
    if header["kind"] == "Stack" or any(map(_HARMLESS.search, before)):
        return None
    # A log in JSON has the traceback in one line; other logs have a prefix, such as the time, before each line.
    rest = _QUOTE.split(header.string[start:])[0].replace('\\"', '"').split("\\n")[1:]
    body = [*rest, *lines[number + 1 :]]
    if body and _FRAME.match(body[0][start:]):
        body = [line[start:] for line in body]
    found = _read_traceback(body)
    return None if found is None else found._replace(origin=_find_origin(before, body))


def _find_origin(before: Sequence[str], body: Sequence[str]) -> str:
    """Return which thread or process an exception ended, from the lines before its traceback and those after it."""
    origin = next(filter(None, map(_ORIGIN.search, reversed(before))), None)
    if origin is not None:
        return f"thread {origin['thread']}" if origin["thread"] else str(origin["process"])
    if body and _FEEDER.match(body[0]):
        return "the feeder thread of a queue"
    if body and _THREAD.match(body[0]):
        return "thread of the rank"
    return "a spawned process" if any(map(_SPAWN.match, body[:2])) else ""


def find_dead_helper(output: str) -> PrintedTraceback | None:
    """Return the last exception that ended a thread or a child of a rank, from its last output; None: none did.

    The rank may have failed since, so that its own tracebacks follow.
    """
    starts = [header.start() for header in _HEADER.finditer(output)][::-1][:_MOST_TRACEBACKS]
    tracebacks = (find_printed_traceback(output[:end]) for end in (len(output), *starts))
    return next((printed for printed in tracebacks if printed is not None and printed.origin), None)


def _read_traceback(lines: Sequence[str]) -> PrintedTraceback | None:
    """Return the traceback whose lines follow its header."""
    end = next((number for number, line in enumerate(lines) if not _IN_TRACEBACK.match(line)), len(lines))
    match = _EXCEPTION.match(lines[end]) if end < len(lines) else None
    if match is None or not any(map(_FRAME.match, lines[:end])):
        return None
    message = [match["message"] or ""]
    rest = end + 1
    while not match["message"] and rest < len(lines) and (not lines[rest] or lines[rest].startswith("  ")):
        message.append(lines[rest].strip())
        rest += 1
    if lines[end - 1].endswith("╯"):  # rich wraps a message at the width of its box
        width = len(lines[end - 1])
        while rest < len(lines) and len(lines[rest - 1]) + len(lines[rest].split(" ")[0]) >= width:
            message.append(lines[rest])
            rest += 1
    is_last = all(map(_AFTERWARDS.match, lines[rest:]))
    return PrintedTraceback(match["type"], " ".join(filter(None, message)).strip()[:MESSAGE_PART], is_last)


def find_remaining_processes(pids: Iterable[int]) -> dict[int, list[RemainingProcess]]:
    """Return those processes that ranks have started, by local rank (Linux)."""
    found: dict[int, list[RemainingProcess]] = {}
    for pid in sorted(pids):
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                local_rank = re.search(rb"(?:^|\0)LOCAL_RANK=(\d{1,4})\0", file.read(_ENVIRONMENT_BYTES))
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                words = file.read(_ENVIRONMENT_BYTES).decode("utf-8", "replace").split("\0")
        except OSError:
            continue  # it has just ended
        if local_rank is not None and process_state(pid) and not _HELPERS.search(" ".join(words)):
            found.setdefault(int(local_rank[1]), []).append(RemainingProcess(pid, name_command(words)))
    return found


def examine_rank_ends(
    pod: Pod, reader: RankReader, remaining: Mapping[int, Sequence[RemainingProcess]]
) -> tuple[RankEnd, ...]:
    """Return the ranks of this pod that may not have completed their training, root causes first.

    ``remaining``: by local rank.
    """
    ends = [_examine(pod, reader, worker, remaining.get(worker.local_rank, ())) for worker in list_workers(pod)]
    found = [end for end in ends if end is not None]
    found.sort(key=lambda end: (end.secondary, not end.exception, end.rank))
    return tuple(found[:MOST_RANK_ENDS])


def describe_ended_ranks(pod: Pod, reader: RankReader, local_ranks: Sequence[int]) -> tuple[RankEnd, ...]:
    """Return the step and the last line of ranks of this pod that have exited with 0, for peers that needed them."""
    workers = [worker for worker in list_workers(pod) if worker.local_rank in local_ranks]
    return tuple(_describe(pod, reader, worker) for worker in workers[:MOST_RANK_ENDS])


def _describe(pod: Pod, reader: RankReader, worker: WorkerRecord) -> RankEnd:
    lines = read_last_lines(pod, worker.local_rank).splitlines()
    line = RANK_PREFIX.sub("", lines[-1]).strip() if lines else ""
    step = reader.rank_progress(worker.local_rank).known_step
    return RankEnd(rank=worker.rank, step=step, pod=pod.node, line=_shorten(line))


def _examine(
    pod: Pod, reader: RankReader, worker: WorkerRecord, remaining: Sequence[RemainingProcess]
) -> RankEnd | None:
    progress = reader.rank_progress(worker.local_rank)
    step = progress.known_step
    is_short = find_missing_steps(progress) > 0
    counters = reader.read_counters(worker.local_rank)
    trains_on = counters is not None and counters.owner in [process.pid for process in remaining]
    if step and not is_short and not trains_on:
        remaining = ()  # a service of the script, such as a tracker's
    printed = find_printed_traceback(read_end(pod, worker.local_rank))
    keeper = _read_keeper(pod, worker)
    is_doubtful = is_short or bool(remaining) or (printed is not None and printed.is_last)
    if not is_doubtful and not keeper:
        return None

    exception = ""
    is_secondary = False
    if printed is not None and is_doubtful:
        exception = printed.text
        is_secondary = classify(WorkerEnd(1, printed.exception_type, printed.message), oom_killed=False).secondary
    return RankEnd(
        rank=worker.rank,
        step=step,
        total=progress.total_steps if is_short else None,
        exception=_shorten(exception),
        secondary=is_secondary,
        processes=tuple(_shorten(process.command) for process in remaining[:_MOST_PROCESSES]),
        keeper=_shorten(keeper),
    )


def _read_keeper(pod: Pod, worker: WorkerRecord) -> str:
    """Return what kept a rank's process alive until it was ended; empty: it ended by itself."""
    known = read_json(os.path.join(pod.runtime, "output", f"{worker.local_rank}.{ENDING}"))
    keeper = known.get("keeper")
    return keeper if known.get("ended") is True and isinstance(keeper, str) else ""


def _shorten(text: str) -> str:
    return text if len(text) <= RANK_END_TEXT else f"{text[: RANK_END_TEXT - 2]} …"
