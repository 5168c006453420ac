"""The code that failed in a DataLoader worker or another helper of PyTorch, whose frames its rank never sees.

``torch._utils.ExceptionWrapper`` takes the text of an exception from a helper to the rank. It takes the failing code
along, as an attribute.
"""

import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final

from ..base.exceptions import FailingCode
from .hooks import ImportHook, observe

_MODULE: Final = "torch._utils"
_FILE: Final = "/torch/_utils.py"
_RAISING: Final = "reraise"
_ATTRIBUTE: Final = "_ddp_failing_code"


class HelperErrors(ImportHook):
    """Adds the failing code to exceptions that PyTorch wraps, in this process and those that it forks.

    ``find_failing_code``: returns that code; it may raise anything.
    """

    def __init__(self, find_failing_code: Callable[[BaseException], FailingCode]) -> None:
        super().__init__(_MODULE)
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


def find_helper_code(trace: TracebackType | None) -> FailingCode | None:
    """Return the code that failed in a helper, from the traceback in its rank; None: the rank itself has failed.

    Raises: TypeError if the helper's record is malformed.
    """
    while trace is not None:
        code = trace.tb_frame.f_code
        if code.co_name == _RAISING and code.co_filename.endswith(_FILE):
            return FailingCode(*vars(trace.tb_frame.f_locals["self"]).get(_ATTRIBUTE, ()))
        trace = trace.tb_next
    return None
