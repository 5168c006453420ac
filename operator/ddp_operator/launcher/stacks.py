"""Python stacks of running workers, as faulthandler writes them."""

import os
import re
import time
from typing import Any, NamedTuple

from .contract import STACK_LIMIT
from .files import is_own_file, log
from .metrics import MetricsEndpoint
from .pod import Pod
from .processes import STACK_SIGNAL, STOPPED_STATES, catches, kill, process_state
from .tracebacks import LIBRARY

_FRAME = re.compile(r'  File "([^"]*)", line (\d+) in (.*)')
# Where a rank stands that waits for its peers: in torch's own calls, or on a line of its own that makes one.
_COLLECTIVE_FILES = re.compile(
    r"/torch/(distributed/|nn/parallel/distributed\.py|autograd/graph\.py|cuda/__init__\.py)"
)
_COLLECTIVE_CALLS = re.compile(
    r"\b(wait|all_\w+|broadcast\w*|barrier|reduce\w*|gather|scatter|send|recv|synchronize|backward|item|tolist|cpu)\("
)
SECONDS_FOR_STACKS = 5.0
_SAVES = re.compile(r"/torch/(serialization|distributed/checkpoint/)")


class Stack(NamedTuple):
    """A worker's main thread: frames as (file, line, function), the outermost first, without the launcher's own."""

    frames: list[tuple[str, int, str]]
    text: str

    @property
    def waits_for_peers(self) -> bool:
        """Whether its innermost frame is in a collective operation, as far as Python can tell."""
        if not self.frames:
            return False
        path, line, _ = self.frames[-1]
        import linecache

        return bool(_COLLECTIVE_FILES.search(path) or _COLLECTIVE_CALLS.search(linecache.getline(path, line)))

    @property
    def place(self) -> str:
        """The innermost frame of the script in words, and where in a library that has led."""
        if not self.frames:
            return "an unknown place"
        own = [frame for frame in self.frames if not LIBRARY.search(frame[0])]
        shown = [*own[-1:], *(self.frames[-1:] if own[-1:] != self.frames[-1:] else [])]
        return ", in ".join(f"{function} ({os.path.basename(path)}:{line})" for path, line, function in shown)

    @property
    def saves(self) -> bool:
        """Whether it writes a checkpoint by torch's own means."""
        return any(_SAVES.search(path) for path, _, _ in self.frames)


def read_stack(text: str) -> Stack:
    """Read what faulthandler wrote about the main thread; nothing where another one took the signal."""
    frames = [(path, int(line), function) for path, line, function in _FRAME.findall(text)] if _is_whole(text) else []
    frames = [frame for frame in reversed(frames) if not is_own_file(frame[0])]
    while frames and (frames[0][0].startswith("<frozen ") or os.path.basename(frames[0][0]) == "runpy.py"):
        del frames[0]
    lines = [f'  File "{path}", line {line}, in {function}' for path, line, function in frames]
    return Stack(frames, "\n".join(["Stack (most recent call last):", *lines]) if lines else "")


def _is_whole(text: str) -> bool:
    """Tell whether the main thread's stack is there to its end: faulthandler writes the innermost hundred frames."""
    return " in worker_main\n" in text or "\n  ...\n" in text


def _read_from(path: str, offset: int) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            file.seek(offset)
            return file.read(STACK_LIMIT)
    except OSError:
        return ""


def collect_stacks(
    pod: Pod, metrics: MetricsEndpoint, workers: list[dict[str, Any]], *, quiet: bool = False
) -> dict[int, Stack]:
    """Return the Python stacks of all ranks, by local rank; they go to the log too, unless ``quiet``."""
    places = {one["localRank"]: os.path.join(pod.runtime, "stacks", str(one["localRank"])) for one in workers}
    able = [one for one in workers if one.get("kind") != "program" and process_state(one["pid"]) not in STOPPED_STATES]
    signalled = [one for one in able if os.path.exists(places[one["localRank"]]) and catches(one["pid"], STACK_SIGNAL)]
    before = {one["localRank"]: os.path.getsize(places[one["localRank"]]) for one in signalled}
    for one in signalled:
        kill(one["pid"], STACK_SIGNAL)
    texts: dict[int, str] = {}
    begun = changed = time.monotonic()
    while time.monotonic() - begun < SECONDS_FOR_STACKS:
        time.sleep(0.05)
        last, texts = texts, {rank: _read_from(places[rank], offset) for rank, offset in before.items()}
        if texts != last:
            changed = time.monotonic()
        settled = all(texts.values()) and time.monotonic() - changed > 1.0
        if settled or all(map(_is_whole, texts.values())):
            break
    for one in () if quiet else workers:
        head = f"---- rank {one['rank']} (pid {one['pid']}, state {process_state(one['pid']) or 'gone'}) ----"
        text = texts.get(one["localRank"])
        log(f"{head}\n{text or 'no stack: its process does not respond'}")
        others = metrics.threads(one["localRank"]) if text else ""
        if others:
            log(others)
    return {rank: read_stack(text) for rank, text in texts.items()}
