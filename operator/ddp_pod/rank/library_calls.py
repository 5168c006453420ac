"""What the main thread waits for: what a library's call is documented to do, and the paths that the script has."""

import re
import sys
import threading
from collections.abc import Iterator, Sequence
from inspect import CO_OPTIMIZED, cleandoc
from itertools import islice, takewhile
from pathlib import PosixPath, PurePosixPath
from types import CodeType, FrameType
from typing import Final

from ..base.exceptions import LIBRARY
from ..base.files import is_own_file

_MOST_FRAMES: Final = 128
_MOST_PATHS: Final = 8
_LIMIT: Final = 400  # characters
_READS_LOCALS: Final = sys.version_info[:2] >= (3, 13)
_SECTION: Final = re.compile(r"[:>.*-]|\w+:\n|[^\n]*\n *[-=]{3}")  # of parameters, examples or a list
_HAS_DOCSTRING: Final = 0x4000000  # since Python 3.14; before, the first constant of a function without one is None


def list_paths(awaited: Sequence[FrameType]) -> dict[str, str]:
    """Return the paths among the variables of the script's innermost line, by name.

    Empty before Python 3.13: there the frame of a running function would keep what was read of it, such as a batch on
    the GPU, until the function returns.
    """
    if not _READS_LOCALS:
        return {}
    frame = next(filter(lambda frame: _is_script(frame.f_code), reversed(_list_all(awaited))), None)
    values = dict(frame.f_locals) if frame is not None else {}
    paths = {name: str(value)[:_LIMIT] for name, value in values.items() if type(value) in (PosixPath, PurePosixPath)}
    return dict(islice(paths.items(), _MOST_PATHS))


def describe_library_call(awaited: Sequence[FrameType]) -> list[str]:
    """Return file, function and documentation of the library's call in which the main thread waits.

    Of the calls below the script's innermost line, the outermost one with a docstring counts, as the script knows it.
    Empty if there is none. ``awaited``: the frames for which its event loop waits.
    """
    frames = _list_all(awaited)
    numbers = [number for number, frame in enumerate(frames) if _is_script(frame.f_code)]
    for frame in frames[numbers[-1] + 1 :] if numbers else ():
        text = read_documentation(frame.f_code)
        if text:
            code = frame.f_code
            return [code.co_filename, code.co_name, getattr(code, "co_qualname", code.co_name), text]
    return []


def _list_all(awaited: Sequence[FrameType]) -> list[FrameType]:
    """Return the main thread's innermost frames and what its event loop waits for, the outermost first."""
    innermost = sys._current_frames().get(threading.main_thread().ident or 0)
    return [*reversed(list(_walk_back(innermost))), *awaited]


def _walk_back(frame: FrameType | None) -> Iterator[FrameType]:
    for _ in range(_MOST_FRAMES):
        if frame is None:
            return
        yield frame
        frame = frame.f_back


def _is_script(code: CodeType) -> bool:
    return not (LIBRARY.search(code.co_filename) or is_own_file(code.co_filename))


def read_documentation(code: CodeType) -> str:
    """Return whole sentences from the first paragraphs of a library function's docstring; empty without one."""
    first = code.co_consts[0] if code.co_consts else None
    is_function = bool(code.co_flags & CO_OPTIMIZED) and not code.co_name.startswith("<")
    has_docstring = sys.version_info < (3, 14) or bool(code.co_flags & _HAS_DOCSTRING)
    if not (isinstance(first, str) and is_function and has_docstring) or _is_script(code):
        return ""
    paragraphs = cleandoc(first[: 4 * _LIMIT]).split("\n\n")
    prose = takewhile(lambda paragraph: not _SECTION.match(paragraph), paragraphs)
    text = " ".join(" ".join(prose).split())
    return text if len(text) <= _LIMIT else text[: text.rfind(". ", 0, _LIMIT) + 1]
