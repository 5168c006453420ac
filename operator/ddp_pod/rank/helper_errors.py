"""The code that failed in a helper process of a rank, whose frames the rank never sees.

Helpers are DataLoader workers and processes of pools and of ``torch.multiprocessing.spawn``. They send an exception, or
its text, to the rank. The failing code goes along: as an attribute, or at the end of the file with the text.
"""

import json
import sys
from collections.abc import Callable
from functools import wraps
from types import TracebackType
from typing import Any, Final, NamedTuple

from ..base.exceptions import FailingCode
from .hooks import ImportHook, observe
from .script_objects import find_member, read_attributes

FindCode = Callable[[BaseException], FailingCode]
_ATTRIBUTE: Final = "_ddp_failing_code"


class _Place(NamedTuple):
    """The function of a module of PyTorch that raises in the rank what a helper has sent."""

    file: str
    function: str


_RERAISE: Final = _Place("/torch/_utils.py", "reraise")
_JOIN: Final = _Place("/torch/multiprocessing/spawn.py", "join")


def observe_helpers(find_failing_code: FindCode) -> None:
    """Add the failing code to what helpers send, in this process and those that it forks.

    ``find_failing_code``: returns that code; it may raise anything.
    """
    hooks = (
        _WrapperHook(find_failing_code),
        _SpawnHook(find_failing_code),
        _PoolHook("multiprocessing.pool", find_failing_code, "ExceptionWithTraceback"),
        _PoolHook("concurrent.futures.process", find_failing_code, "_ExceptionWithTraceback"),
    )
    for hook in hooks:
        hook.start()


class _WrapperHook(ImportHook):
    """Completes ``ExceptionWrapper``, which takes the text of an exception."""

    def __init__(self, find_failing_code: FindCode) -> None:
        super().__init__("torch._utils")
        self._find_failing_code = find_failing_code

    def watch(self, module: Any) -> None:
        """Wrap the constructor."""
        wrapper = getattr(module, "ExceptionWrapper", None)
        if wrapper is not None:
            wrapper.__init__ = observe(wrapper.__init__, after=self._note)

    def _note(self, _: None, wrapper: Any, exc_info: Any = None, *__: Any, **___: Any) -> None:
        try:
            error: Any = (exc_info or sys.exc_info())[1]
            vars(wrapper)[_ATTRIBUTE] = tuple(self._find_failing_code(error))
        except Exception:  # a bug here must never reach the program
            pass


class _PoolHook(ImportHook):
    """Completes exceptions that a pool sends. ``carrier``: the class around one, which removes its frames."""

    def __init__(self, module: str, find_failing_code: FindCode, carrier: str) -> None:
        super().__init__(module)
        self._find_failing_code = find_failing_code
        self._carrier = carrier

    def watch(self, module: Any) -> None:
        """Wrap the constructor."""
        carrier = getattr(module, self._carrier, None)
        if carrier is not None:
            carrier.__init__ = observe(carrier.__init__, before=self._note)

    def _note(self, _: Any, error: Any, *__: Any, **___: Any) -> None:
        try:
            # A class with state of its own may not accept another attribute when it is built again.
            if all(_is_original(error, name) for name in ("__setattr__", "__setstate__")):
                vars(error)[_ATTRIBUTE] = tuple(self._find_failing_code(error))
        except Exception:  # a bug here must never reach the program
            pass


def _is_original(error: BaseException, name: str) -> bool:
    return find_member(type(error), name) is vars(BaseException)[name]


class _SpawnHook(ImportHook):
    """Completes the file of a process of ``spawn``, from which the rank reads one pickled text."""

    def __init__(self, find_failing_code: FindCode) -> None:
        super().__init__("torch.multiprocessing.spawn")
        self._find_failing_code = find_failing_code

    def watch(self, module: Any) -> None:
        """Wrap the function that runs in the process."""
        original = getattr(module, "_wrap", None)
        if original is not None:
            module._wrap = self._complete(original)

    def _complete(self, original: Callable[..., None]) -> Callable[..., None]:
        @wraps(original)  # it is pickled by its name
        def run(function: Any, number: int, arguments: Any, path: Any) -> None:
            try:
                original(function, number, arguments, path)
            except SystemExit as end:  # raised after the file was written
                self._note(end.__context__, path)
                raise

        return run

    def _note(self, error: BaseException | None, path: str) -> None:
        try:
            if error is not None:
                with open(path, "a", encoding="ascii") as file:
                    file.write(f"\n{json.dumps(self._find_failing_code(error))}")
        except Exception:  # a bug here must never reach the program
            pass


def find_helper_code(error: BaseException) -> FailingCode | None:
    """Return the code that failed in a helper, from the exception in its rank; None: the rank itself has failed.

    Raises: anything that a malformed record of the helper causes.
    """
    record = read_attributes(error).get(_ATTRIBUTE)
    if record is not None:
        return FailingCode(*record)
    trace = error.__traceback__
    while trace is not None:
        place = _find_place(trace)
        if place is _RERAISE:
            return FailingCode(*vars(trace.tb_frame.f_locals["self"]).get(_ATTRIBUTE, ()))
        if place is _JOIN:
            return _read_code(trace.tb_frame.f_locals)
        trace = trace.tb_next
    return None


def _find_place(trace: TracebackType) -> _Place | None:
    code = trace.tb_frame.f_code
    places = (place for place in (_RERAISE, _JOIN) if code.co_name == place.function)
    return next((place for place in places if code.co_filename.endswith(place.file)), None)


def _read_code(variables: dict[str, Any]) -> FailingCode:
    """Return the code at the end of a file of ``spawn``; empty: the process has ended otherwise."""
    if variables.get("original_trace") is None:
        return FailingCode()
    with open(variables["self"].error_files[variables["error_index"]], "rb") as file:
        return FailingCode(*json.loads(file.read().rpartition(b"\n")[2]))
