"""Tracebacks as text: their frames, what is of a library, and the exceptions at their end."""

from __future__ import annotations

import itertools
import re

PLACE = re.compile(r'  File "([^"]*)", line (\d+)')
LIBRARY = re.compile(r"[/\\](site|dist)-packages[/\\]|[/\\]lib(64)?[/\\]python3[^/\\]*[/\\]|^<frozen ")
_SHORT_TRACEBACK = 15  # lines
_LIBRARY_CALLS_KEPT = 2
_RANK_IN_FRONT = re.compile(r"^\[rank\d+\]: ?")
_EXCEPTION = re.compile(r"([A-Za-z_][\w.]*)(?:: (.*))?$")


def fold_libraries(text: str) -> str:
    """Return a long traceback without most calls inside libraries: what is kept of it is a tail, which shall hold the
    script's own lines. The log has the whole."""
    blocks: list[tuple[bool | None, str]] = []  # a library's call, the script's own, or None for any other line
    for line in text.splitlines(True):
        place = PLACE.match(line)
        if place:
            blocks.append((bool(LIBRARY.search(place[1])), line))
        elif blocks and blocks[-1][0] is not None and line.startswith("  "):
            blocks[-1] = (blocks[-1][0], blocks[-1][1] + line)
        else:
            blocks.append((None, line))
    runs = [(kind, [block for _, block in run]) for kind, run in itertools.groupby(blocks, lambda block: block[0])]
    if text.count("\n") <= _SHORT_TRACEBACK or all(kind is not False for kind, _ in runs):
        return text
    shown = []
    for number, (kind, run) in enumerate(runs):
        last = number + 1 == len(runs) or runs[number + 1][0] is None
        kept = _LIBRARY_CALLS_KEPT if last else 0
        if kind and len(run) > kept + 1:
            shown.append(f"  ... {len(run) - kept} calls inside libraries ...\n")
            run = run[len(run) - kept :]
        shown += run
    return "".join(shown)


def describe(error: BaseException) -> dict[str, str]:
    """Return an exception as JSON."""
    import traceback

    trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return {"type": type(error).__name__, "message": str(error), "traceback": trace[-8192:]}


def find_exceptions(lines: str) -> list[tuple[str, str]]:
    """Return type and message of the exceptions whose tracebacks a program wrote at last, one of each rank in it."""
    texts: dict[str, list[str]] = {}
    for line in lines.splitlines():
        front = _RANK_IN_FRONT.match(line)
        texts.setdefault(front[0].strip() if front else "", []).append(line[front.end() :] if front else line)
    found = []
    for lines_ in texts.values():
        frames = [number for number, line in enumerate(lines_) if PLACE.match(line)]
        after = itertools.dropwhile(lambda line: line.startswith("    "), lines_[frames[-1] + 1 :] if frames else [])
        last = _EXCEPTION.match(next(after, ""))
        if last:
            found.append((last[1], last[2] or ""))
    return found
