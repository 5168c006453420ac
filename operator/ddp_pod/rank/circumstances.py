"""What the process shows about an exception, and the exception does not say.

The deleted working folder, the output without a reader, the file that hides a package, the pickled file that needs a
module, the limit of the address space, the optimizer without gradients, the store that has no key: each is observed
when the exception ends the rank.
This module is loaded before the program starts, like ``tracebacks``.
"""

import errno
import os
import re
import resource
import select
import sys
from importlib.machinery import PathFinder
from itertools import islice
from opcode import opmap
from types import ModuleType
from typing import Any, Final, NamedTuple

from ..base.exceptions import (
    ADDRESS_SPACE,
    CLOSED_OUTPUT,
    ENDED_READER,
    HIDDEN_PACKAGE,
    LIBRARY,
    NO_FOLDER,
    NO_GRADIENTS,
    PICKLED_NAME,
    STORE_KEY,
    ExceptionFacts,
)
from .anomaly import describe_forward
from .ended_children import find_ended_program
from .read_files import list_read_files
from .script_objects import is_instance, is_tensor, list_names, list_optimized, read_property

_WORKING_FOLDER: Final = "/proc/self/cwd"
_DELETED: Final = " (deleted)"  # proc(5)
_STACK: Final = 16 << 20  # bytes that a new thread needs at most by default: its stack and its heap's first pages
_MIB: Final = 1 << 20
_MOST_BYTES: Final = 4 << 20  # read of a file; torch.save writes the names first
_MOST_FILES: Final = 8  # that may be the pickled one
_STEPS: Final = ("step", "unscale_")  # of optimizers and of GradScaler
_OPTIMIZING: Final = re.compile(r"[/\\]torch[/\\](amp|optim)[/\\]")
_ASKED: Final = re.compile(r"allocate (\d{1,18}) bytes")  # of torch
_NOT_IMPORTED: Final = re.compile(r"cannot import name '([^']+)'")
_NOT_UNPICKLED: Final = re.compile(r"Can't get attribute '([^']+)' on ")  # of pickle alone
_IMPORTER: Final = re.compile(r"[/\\]importlib[/\\]|^<frozen importlib")


class Circumstance(NamedTuple):
    """What was observed. ``content``: its kind in the table of failures, or empty; ``note``: for the message's end."""

    content: str
    note: str


def find_circumstance(error: BaseException, facts: ExceptionFacts) -> Circumstance | None:
    """Return what the process shows about an exception; None: nothing. ``facts``: what is known of it.

    The exception may be of any class of the script, whose attributes may raise anything.
    """
    if isinstance(error, FileNotFoundError):
        return _find_deleted_folder(error)
    if isinstance(error, BrokenPipeError):
        return _find_closed_output(error) or _find_ended_reader(error)
    if isinstance(error, (ImportError, AttributeError)):
        return _find_hidden_package(error, facts.message) or _find_pickled_name(error, facts)
    if _OPTIMIZING.search(facts.place):
        return _find_absent_gradients(error)
    forward = describe_forward(sys.modules.get("torch"), error) if type(error) is RuntimeError else ""
    if forward:
        return Circumstance("", forward)
    if isinstance(error, (RuntimeError, MemoryError, OSError)):
        return _find_address_limit(error, facts.message) or _find_store_wait(facts)
    return None


def _find_deleted_folder(error: FileNotFoundError) -> Circumstance | None:
    """Return that the working folder is gone, for an error about a relative path or about no path."""
    path = error.filename
    if is_instance(path, str) and os.path.isabs(path):
        return None
    try:
        folder = os.readlink(_WORKING_FOLDER)
    except OSError:
        return None
    if not folder.endswith(_DELETED):
        return None
    return Circumstance(NO_FOLDER, f" (the working folder {folder.removesuffix(_DELETED)} was deleted)")


def _find_closed_output(error: BrokenPipeError) -> Circumstance | None:
    """Return that nobody reads the output any more, for an error about no path: it may be of another pipe or socket."""
    if error.filename is not None:
        return None
    poll = select.poll()
    for number in (1, 2):
        poll.register(number, 0)
    closed = [number for number, events in poll.poll(0) if events & select.POLLERR]
    return Circumstance(CLOSED_OUTPUT, f" (descriptor {closed[0]} is a pipe without a reader)") if closed else None


def _find_ended_reader(error: BrokenPipeError) -> Circumstance | None:
    """Return that a program which the script has started has ended, for an error about no path."""
    ended = None if error.filename is not None else find_ended_program(error)
    if ended is None:
        return None
    return Circumstance(ENDED_READER, f" (its process {ended.name} {ended.end})")


def _find_hidden_package(error: BaseException, message: str) -> Circumstance | None:
    """Return that a file of the script has the name of an installed package, which has what was not found."""
    owner: Any = getattr(error, "obj", None)  # of an AttributeError, from Python 3.10
    name: Any = getattr(error, "name", None)
    missing = _read_name(_NOT_IMPORTED, message)
    if type(owner) is ModuleType:
        missing = name
        name = owner.__name__
    if not is_instance(name, str) or not name:
        return None
    top, _, submodule = name.partition(".")
    missing = submodule or missing
    path: Any = getattr(sys.modules.get(top), "__file__", None)
    if not is_instance(missing, str) or not missing or not is_instance(path, str) or LIBRARY.search(path):
        return None
    folder = os.path.dirname(os.path.abspath(path))
    if os.path.basename(path).startswith("__init__."):
        folder = os.path.dirname(folder)
    spec = PathFinder.find_spec(top, [entry for entry in sys.path if os.path.abspath(entry) != folder])
    if spec is None or not spec.origin or not LIBRARY.search(spec.origin):
        return None
    submodules = spec.submodule_search_locations
    part = missing.partition(".")[0]
    has_module = submodules is not None and PathFinder.find_spec(f"{top}.{part}", submodules) is not None
    if not has_module and not _has_name(spec.origin, part):
        return None
    return Circumstance(HIDDEN_PACKAGE, f" ({path} hides {spec.origin})")


def _find_pickled_name(error: BaseException, facts: ExceptionFacts) -> Circumstance | None:
    """Return the file whose pickled objects need a module, or a name in one, that is not there.

    The unpickler imports the name, no statement does; and the file has it.
    """
    name: Any = _read_name(_NOT_UNPICKLED, facts.message)
    if isinstance(error, ImportError) and not _is_import(error, facts.place):
        name = error.name
    if not is_instance(name, str) or not name:
        return None
    files = islice(list_read_files(error, LIBRARY), _MOST_FILES)
    file = next((file for file in files if _has_name(file.path, name)), None)
    return None if file is None else Circumstance(PICKLED_NAME, f" (named in {file.path})")


def _is_import(error: BaseException, place: str) -> bool:
    """Return whether a statement, or importlib, has raised an exception. ``place``: the file of its innermost frame."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or _IMPORTER.search(place):
        return True
    code = trace.tb_frame.f_code.co_code
    return code[trace.tb_lasti] in (opmap["IMPORT_NAME"], opmap["IMPORT_FROM"])


def _read_name(pattern: "re.Pattern[str]", message: str) -> str:
    """Return what was not found in a module, which not all versions of Python record; empty: nothing of this kind."""
    quoted = pattern.match(message)
    return quoted[1] if quoted else ""


def _has_name(path: str, name: str) -> bool:
    """Return whether the beginning of a file has a name."""
    try:
        with open(path, "rb") as file:
            return name.encode() in file.read(_MOST_BYTES)
    except (OSError, ValueError):
        return False


def _find_address_limit(error: BaseException, message: str) -> Circumstance | None:
    """Return that the address space is limited, and has no room for another thread, or for what was asked for."""
    number = getattr(error, "errno", None)
    text = message if type(error) is RuntimeError else ""  # of CPython's threads and torch's tensors: no number
    is_thread = "thread" in text
    is_memory = isinstance(error, MemoryError) or "alloc" in text
    if not is_thread and not is_memory and number not in (errno.ENOMEM, errno.EAGAIN):
        return None
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return None
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        with open("/proc/meminfo", encoding="ascii") as file:
            available = next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable:"))
    except (OSError, ValueError, StopIteration):
        return None
    asked = _ASKED.search(message)
    needed = int(asked[1]) if asked else _STACK if number == errno.EAGAIN or is_thread else available
    if limit - used > needed:
        return None
    return Circumstance(ADDRESS_SPACE, f" ({used // _MIB} of {limit // _MIB} MiB of its address space are used)")


def _find_absent_gradients(error: BaseException) -> Circumstance | None:
    """Return that none of the parameters has a gradient which a step of an optimizer should change."""
    torch = sys.modules["torch"]
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        is_step = code.co_name in _STEPS and _OPTIMIZING.search(code.co_filename)
        names = code.co_varnames[: code.co_argcount] if is_step else ()
        for value in map(trace.tb_frame.f_locals.get, names):
            parameters = list_optimized(value) if "Optimizer" in list_names(type(value)) else ()
            tensors = [tensor for tensor in parameters if is_tensor(torch, tensor)]
            if tensors and all(read_property(torch, tensor, "grad") is None for tensor in tensors):
                return Circumstance(NO_GRADIENTS, " (no parameter of the optimizer has a gradient)")
        trace = trace.tb_next
    return None


def _find_store_wait(facts: ExceptionFacts) -> Circumstance | None:
    """Return that a line of the script itself has waited for a key of the store of torch.distributed."""
    is_own = facts.place and not LIBRARY.search(facts.place)
    return Circumstance(STORE_KEY, "") if is_own and facts.is_a("torch.distributed.DistStoreError") else None
