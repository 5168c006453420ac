"""Which helper process of a rank has ended: those who wait for it see a closed connection or pipe at most.

This module is loaded before the program starts, like ``tracebacks``.
"""

import os
import sys
import time
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from ..base.exceptions import EndedChild
from ..contract.processes import name_command
from .script_objects import is_instance, read_attributes

_SECONDS_FOR_END: Final = 0.5  # a process closes its connections before its parent sees it end
_SECONDS_BETWEEN_LOOKS: Final = 0.02
_MOST_CHILDREN: Final = 256
_NAME_LIMIT: Final = 80  # characters


class EndedProgram(NamedTuple):
    """A program that the script has started by subprocess. ``end``: its exit code or its signal, as a text."""

    name: str
    end: str


def find_ended_child(error: BaseException) -> EndedChild | None:
    """Return a child that a signal has killed, or that failed, for an exception of a rank that may have waited for it.

    Exceptions of lost connections arrive before the end of the process, which is awaited then.
    """
    module = sys.modules.get("multiprocessing.process")
    deadline = time.monotonic() + _SECONDS_FOR_END
    while True:
        children = tuple(getattr(module, "_children", ()))[:_MOST_CHILDREN]
        ended = min(filter(None, map(_examine, children)), key=_get_exit_code, default=None)
        may_follow = bool(children) and isinstance(error, (ConnectionError, EOFError))
        if ended is not None or not may_follow or time.monotonic() > deadline:
            return ended
        time.sleep(_SECONDS_BETWEEN_LOOKS)


def _examine(child: Any) -> EndedChild | None:
    """Return a child if it has ended, other than with 0. It may be of any class of the script."""
    try:
        code = child._popen.poll()
        name = child.name
    except Exception:
        return None
    has_failed = is_instance(code, int) and code != 0 and is_instance(name, str)
    return EndedChild(str(name)[:_NAME_LIMIT], code) if has_failed else None


def _get_exit_code(child: EndedChild) -> int:
    return child.exit_code


def find_ended_program(error: BaseException) -> EndedProgram | None:
    """Return the only program known to the frames of an exception that has ended; None: none has, or several have.

    The script itself still learns of its end: the process is not awaited.
    """
    deadline = time.monotonic() + _SECONDS_FOR_END
    while True:
        programs = {id(program): program for program in _list_programs(error)}.values()
        ended = list(filter(None, map(_describe_end, programs)))
        if ended or not programs or time.monotonic() > deadline:
            return ended[0] if len(ended) == 1 else None
        time.sleep(_SECONDS_BETWEEN_LOOKS)


def _list_programs(error: BaseException) -> Iterator[Any]:
    """Yield the objects of subprocess in the variables of an exception's frames, and in the attributes of these."""
    module = sys.modules.get("subprocess")
    trace = error.__traceback__
    while trace is not None and module is not None:
        for value in list(trace.tb_frame.f_locals.values()):
            for candidate in (value, *read_attributes(value).values()):
                if type(candidate) is module.Popen:
                    yield candidate
        trace = trace.tb_next


def _describe_end(program: Any) -> EndedProgram | None:
    arguments = program.args if type(program.args) in (list, tuple) else [program.args]
    name = name_command(word for word in arguments if type(word) is str)
    code = program.returncode
    if code is None:
        try:
            state = os.waitid(os.P_PID, program.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except OSError:
            return None
        if state is None:
            return None
        code = state.si_status if state.si_code == os.CLD_EXITED else -state.si_status
    return EndedProgram(name, f"was killed by signal {-code}" if code < 0 else f"has ended with exit code {code}")
