"""Exceptions as the launcher knows them: as a rank records them, and as its output shows them."""

import builtins
import re
import sys
import traceback
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

PLACE: Final = re.compile(r'  File "([^"]*)", line (\d+)')
LIBRARY: Final = re.compile(r"[/\\](site|dist)-packages[/\\]|[/\\]lib(64)?[/\\]python3[^/\\]*[/\\]|^<frozen ")
RANK_PREFIX: Final = re.compile(r"^\[rank\d+\]: ?")
_EXCEPTION: Final = re.compile(r"([A-Za-z_][\w.]*)(?:: (.*))?$")
# The line between two exceptions of a chain, with the reason of the second.
_CHAINED: Final = re.compile(r"(During handling of|The above exception was the direct cause)")
_NATIVE_PLACE: Final = re.compile(r"\.(cc|cpp|cu|h|hpp):\d+")  # in a message of a library that the script quotes
_RAISES: Final = re.compile(r"(^|[:;]) *(raise|assert)\b|\bexit\(")
# The message of the C++ runtime before it aborts the process.
_NATIVE_EXCEPTION: Final = re.compile(
    r"terminate called after throwing an instance of '(?P<type>[\w:]{1,200})'(?:\s+what\(\): *(?P<message>[^\n]*))?"
)
MESSAGE_PART: Final = 4096  # characters kept of a long message's beginning, and of its end
CHAIN_LIMIT: Final = 16  # exceptions
CHAIN_PART: Final = 1024  # characters kept of a message's beginning and end in the chain
LINE_LIMIT: Final = 200
_LOGGED_LIMIT: Final = 8192  # characters of a traceback that the launcher reports of itself
_GROUP_SHOWN: Final = 2
_FIRST_LINES: Final = 8  # kept of a long message in a traceback
_LAST_LINES: Final = 4
_TRACE_PART: Final = 256  # characters kept of a message's beginning and end in a traceback, beside its frames

# What was there instead of what was expected (``ExceptionFacts.content``): of a file, or of the process.
LFS_POINTER: Final = "a Git LFS pointer"
NOT_EXECUTABLE: Final = "not executable"
HTML_PAGE: Final = "an HTML page"
EMPTY: Final = "an empty file"
CUT_ARCHIVE: Final = "an incomplete zip archive"
PICKLED_NAME: Final = "a pickle of code that is absent"
HIDDEN_PACKAGE: Final = "a file that hides a package"
NO_FOLDER: Final = "a working folder that was deleted"
ADDRESS_SPACE: Final = "a limited address space"
CLOSED_OUTPUT: Final = "an output without a reader"
ENDED_READER: Final = "a pipe whose reader has ended"
NO_GRADIENTS: Final = "an optimizer without gradients"
STORE_KEY: Final = "a key that no rank has set"

# From where values come that another attempt may find otherwise (``FailingCode.sources``).
NETWORK: Final = "network"
PROCESS: Final = "process"
SIGNAL: Final = "signal"
FILE: Final = "file"
MACHINE: Final = "machine"
CLOCK: Final = "clock"
RANDOM: Final = "random"
THREAD: Final = "thread"


class FailingCode(NamedTuple):
    """What is known of the code that raised an exception; empty texts: unknown.

    ``code``: of the script's own line, empty for a check; ``check``: what a library's check requires, or what one of
    the script refuses; ``values``: of names in these; ``differ``: in what they do not fit
    (``Values.find_difference``); ``names``: which names exist instead of one that was not found, in ``package``, with
    its version; ``device``: on which native code has raised, of torch for known tensors or of Python for plain values;
    ``variant``: a function of the library for other values of the same call, as
    binary_cross_entropy_with_logits; ``documentation``: of the library's function that raised; ``advice``: what to do,
    by an object that refused its use; ``sources``: words for where the values come from (``rank/sources``).
    """

    code: str = ""
    check: str = ""
    values: str = ""
    differ: str = ""
    names: str = ""
    package: str = ""
    device: str = ""
    variant: str = ""
    documentation: str = ""
    advice: str = ""
    sources: str = ""

    @property
    def is_known(self) -> bool:
        """Whether there is more than the sources of values."""
        return any(self._replace(sources=""))


class ExceptionFacts(NamedTuple):
    """One exception of a chain, as the rank records it; from a text without what the text does not show."""

    types: tuple[str, ...] = ("",)
    """Its class and the base classes, each with its module unless that is builtins or the script."""
    message: str = ""
    errno: int | None = None
    path: str = ""
    """The file of an OSError, or of torch.save."""
    place: str = ""
    """The file of the innermost frame."""
    line: str = ""
    """The source line there."""
    handled: bool = False
    """Whether the outermost exception was raised while this one was handled, rather than because of it."""
    status: int | None = None
    """The status of an HTTP response that a library's exception carries, 400 to 599."""
    content: str = ""
    """What was found instead of what was expected: of a file that could not be read or executed, or of the process."""
    lasting: bool = False
    """Whether the next attempt would find the file or the path that it is about as this one did."""
    hides: tuple[str, ...] = ()
    """The class, and its bases, of an exception that it replaces by ``from None``."""
    failing: FailingCode = FailingCode()

    @property
    def text(self) -> str:
        """The exception as Python prints it."""
        return f"{self.types[0]}: {self.message}"

    def is_a(self, name: str) -> bool:
        """Return whether it is of a class, or with a dot at the end of a class in that package."""
        return any(kind == name or (name.endswith(".") and kind.startswith(name)) for kind in self.types)

    @property
    def is_builtin(self) -> bool:
        """Whether it is of a class that Python has without an import."""
        return isinstance(getattr(builtins, self.types[0], None), type)

    @property
    def is_remote(self) -> bool:
        """Whether it is the text of an exception of a pool's process, rather than an exception."""
        return is_remote_text(self.types[0])

    @property
    def by_script(self) -> bool:
        """Whether the script itself chose the message: by raise, assert or exit, or as the key of a lookup."""
        is_own = self.place and not LIBRARY.search(self.place) and not _NATIVE_PLACE.search(self.message)
        return bool(is_own) and (self.is_check or self.is_a("LookupError"))

    @property
    def is_check(self) -> bool:
        """Whether a statement has raised it, by raise, assert or exit, rather than an operation."""
        return bool(_RAISES.search(self.line))


def is_remote_text(name: str) -> bool:
    """Return whether a class, by its name with its module, is what a pool's process sends of its traceback."""
    module, _, name = name.rpartition(".")
    return name.lstrip("_") == "RemoteTraceback" and bool(module)


class EndedChild(NamedTuple):
    """A process that multiprocessing has started, such as a DataLoader worker. ``exit_code``: negative: a signal's."""

    name: str
    exit_code: int

    @property
    def number(self) -> int:
        """The number of the signal that killed it; 0 if none did."""
        return max(0, -self.exit_code)


def describe(error: BaseException) -> dict[str, str]:
    """Return type, message and traceback of an exception."""
    trace = format_exception(error, error.__traceback__)
    return {"type": type(error).__name__, "message": str(error), "traceback": trace[-_LOGGED_LIMIT:]}


def format_exception(error: BaseException, frames: Any) -> str:
    """Return the traceback of an exception, without what would displace the frames.

    That are the middles of long messages, and all but the first exceptions of a group.
    """
    options: dict[str, Any] = {"max_group_width": _GROUP_SHOWN} if sys.version_info >= (3, 11) else {}
    entries = traceback.TracebackException(type(error), error, frames, **options).format()
    return "".join(shorten_entry(entry, _TRACE_PART) for entry in entries)


def shorten_entry(entry: str, part: int) -> str:
    """Return a part of a traceback without its middle, if it is a long message rather than a frame.

    The message of a helper process, such as a DataLoader worker, has frames itself, which remain.
    """
    if PLACE.match(entry):
        return entry
    lines = entry.splitlines(True)
    start = 1 + max((number for number, line in enumerate(lines) if PLACE.match(line)), default=-1)
    while 0 < start < len(lines) and lines[start].startswith("    "):
        start += 1
    frames = shorten("".join(lines[:start]), MESSAGE_PART)
    return frames + shorten_message("".join(lines[start:]), part)


def find_exceptions(output: str) -> list[list[ExceptionFacts]]:
    """Return the chain of the last exception in a program's output; with rank prefixes, of each rank."""
    lines_by_prefix: dict[str, list[str]] = {}
    for line in output.splitlines():
        prefix = RANK_PREFIX.match(line)
        key = prefix[0].strip() if prefix else ""
        lines_by_prefix.setdefault(key, []).append(line[prefix.end() :] if prefix else line)
    chains = [parse_chain(lines) for lines in lines_by_prefix.values()]
    return [chain for chain in chains if chain]


def parse_chain(lines: Iterable[str]) -> list[ExceptionFacts]:
    """Return the exceptions of the last traceback in a text, the outermost first."""
    chain: list[ExceptionFacts] = []  # the outermost last
    frame: ExceptionFacts | None = None
    link = ""  # how the next exception follows the last one
    for line in lines:
        place = PLACE.match(line)
        chained = _CHAINED.match(line)
        if place:
            frame = ExceptionFacts(place=place[1])
        elif chained:
            link = chained[1]
        elif frame is not None and line.startswith("    "):
            frame = frame._replace(line=frame.line or line.strip()[:LINE_LIMIT])
        elif frame is not None and line and not line.startswith(" "):
            exception = _EXCEPTION.match(line)
            former = chain[-CHAIN_LIMIT:] if link else []
            if link.startswith("During"):
                former = [facts._replace(handled=True) for facts in former]
            chain = [*former, frame._replace(types=(exception[1],), message=exception[2] or "")] if exception else []
            frame = None
            link = ""
    return chain[::-1] if frame is None else []


def find_native_exception(output: str) -> tuple[str, str] | None:
    """Return type and message of the C++ exception that ended a program, from its output; None if there is none."""
    matches = list(_NATIVE_EXCEPTION.finditer(output))
    if not matches:
        return None
    return matches[-1]["type"].replace("::", "."), (matches[-1]["message"] or "").strip()


def shorten(text: str, part: int) -> str:
    """Return a text without the middle of a long one: a helper's whole traceback has the reason at its end."""
    return text if len(text) <= 2 * part else f"{text[:part]}\n...\n{text[-part:]}"


def shorten_message(text: str, part: int = CHAIN_PART) -> str:
    """Return a message of at most a dozen lines, without the middle of a longer one.

    ``part``: characters kept of its beginning, and of its end.
    """
    lines = text.splitlines(True)
    omitted = len(lines) - _FIRST_LINES - _LAST_LINES
    if omitted > 1:
        text = "".join([*lines[:_FIRST_LINES], f"... {omitted} lines ...\n", *lines[-_LAST_LINES:]])
    return shorten(text, part)
