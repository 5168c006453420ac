"""Whether every attempt would fail as this one did, by what a rank has recorded of its exception.

An exception comes again unless something observed speaks against that: an error of the system, a service, a peer, a
device, memory, a helper process, a wait, or a value that comes from one of these (``rank/sources``).
"""

import errno
import re
from collections.abc import Sequence
from typing import Final

from ..base.exceptions import CLOCK, FILE, NETWORK, PROCESS, SIGNAL, THREAD, ExceptionFacts
from ..contract.failure_table import SIGNIFICANT_SECONDS
from .kinds import COLLECTIVES, NON_FINITE, OTHER_SIZE, PEERS, REFUSED_ARGUMENTS, SHARED_LIBRARY, TENSORS, FailureKind

_GENERAL: Final = "RuntimeError"
_ASSERTION: Final = "AssertionError"
_CHANGED: Final = "during iteration"  # of a container, by the loop itself or by a thread
# Builtin classes of what code itself is wrong about, whatever its message contains.
_MISTAKE: Final = re.compile(
    r"(Arithmetic|Attribute|Import|Lookup|Name|NotImplemented|Recursion|Syntax|Type)Error\Z|StopIteration\Z"
)
# Of what a script may refuse.
_REFUSAL: Final = re.compile(r"(Value|Assertion)Error\Z|SystemExit\Z")
# Classes of what another attempt may find otherwise. Floating point numbers depend on their order; archives are often
# incomplete.
_OUTSIDE: Final = re.compile(
    r"(EOF|Memory|FloatingPoint|UnicodeDecode)Error\Z|KeyboardInterrupt\Z|threading\.BrokenBarrierError"
    r"|(concurrent\.futures|asyncio|_?queue|multiprocessing|subprocess|torch\.distributed)\."
    r"|zipfile\.BadZipFile|zlib\.error|_lzma\.LZMAError|torch\.(OutOfMemory|Accelerator)Error"
)
_SYSTEM: Final = re.compile(r"OSError\Z")
# Those of them that are about more than their arguments, although they have no number.
_STATE_OF_SYSTEM: Final = re.compile(
    r"(Connection|Timeout|BlockingIO|ChildProcess|Interrupted)Error\Z|(ssl|socket|urllib|requests)\."
)
# Of modules for databases, by PEP 249: the service, rather than the query.
_OF_DATABASE: Final = re.compile(r".+\.(OperationalError|InterfaceError|InternalError)$")
_OF_QUERY: Final = re.compile(r".+\.(ProgrammingError|IntegrityError|DataError|NotSupportedError)$")
_REFUSALS: Final = (400, 405, 422)  # of HTTP: the request itself is wrong
# What passes on another exception of the chain.
_NEUTRAL: Final = re.compile(r"SystemExit\Z|(Base)?ExceptionGroup\Z|(multiprocessing|concurrent)\..*RemoteTraceback\Z")
_OF_PATHS: Final = re.compile(r"shutil\.SameFileError\Z")  # whatever the files contain
# Sources that make each value doubtful; others only what a check has found.
_UNSTEADY: Final = {NETWORK, PROCESS, SIGNAL, FILE}
# Modules of torch whose native calls check arguments and states, and need nothing from outside.
_TORCH: Final = re.compile(
    r"[/\\]torch[/\\](amp|autograd|nn[/\\](functional|modules|utils[/\\])|optim|functional|_tensor)\b"
)
_ARGUMENTS: Final = re.compile(r"[/\\]torch[/\\](amp|nn|optim)[/\\]")  # whose ValueErrors are about these
# Modules that pass on errors of peers, processes, devices and files, other than by a check of their own.
_MEDIATORS: Final = re.compile(
    r"[/\\](torch[/\\](distributed|multiprocessing|utils[/\\]data|cuda|hub|serialization|_utils)"
    r"|python3[^/\\]*[/\\](multiprocessing[/\\](?!context)|asyncio[/\\](?!runners)|concurrent|http|urllib|subprocess"
    r"|socket|ssl))\b"
)
# What a message, an assertion or the line of a raise may have looked at: code has checked something outside.
_THINGS: Final = (
    r"time-?d?[_ ]?out|\bconnect|network|download|server|https?\b|\bmount|disk|space left|memory|gpu|cuda|nccl|answer"
    r"|\brespon[ds]|unavailable"
)
# The same where the condition is not known. Of a known one, ``rank/sources`` finds it.
_CHECKED: Final = re.compile(
    rf"(?i){_THINGS}|exists?\b|not found|no such|is_?(file|dir)|available|alive|return_?code"
    r"|\b(b?locked|busy|ready|retr(y|ies))\b"
)
_NAMED: Final = re.compile(rf"(?i){_THINGS}")
# To the documentation of an error, or where to report it.
_LINK: Final = re.compile(r"(?i)\b(visit|see|at|to|documentation|details)\W{1,3}https?://\S+")
_NUMERIC: Final = re.compile(r"(?i)finite|is_?nan|is_?inf|\bnan\b|\binf\b|probabilit|\ball\selements\sof\b")
# The same for errors of torch's native code.
_NATIVE: Final = re.compile(
    rf"(?i){PEERS}|cu(da|dnn|blas|solver|sparse|fft)|\b(hip|roc|miopen|gpu|nvml|mps)|\bxpu|driver|enforce\b"
    r"|(\b|d_)alloc|peer|create a primitive"
)


def recurs(kind: FailureKind, chain: Sequence[ExceptionFacts], *, lasted: float, elastic: bool) -> bool:
    """Return whether each attempt would raise these exceptions again.

    ``lasted``: seconds that the rank has run; ``elastic``: whether the next attempt may have another number of ranks.
    Ranks that leave their common order within minutes do so again; after hours that depends on times.
    """
    if kind is COLLECTIVES:
        return lasted < SIGNIFICANT_SECONDS
    if kind is NON_FINITE or (kind is OTHER_SIZE and elastic):  # the former may be the fault of a device
        return False
    if kind is SHARED_LIBRARY:  # the loader searches in folders of the image
        return True
    if kind.may_pass and not any(facts.lasting for facts in chain):
        return False
    if _is_of_no_kind([facts for facts in chain if not facts.handled][-1:]):
        return False
    decisive = [facts for facts in chain if not _is_expected(facts, chain[0])]
    return not all(map(_is_neutral, decisive)) and not any(map(_may_pass, decisive))


def _is_of_no_kind(innermost: Sequence[ExceptionFacts]) -> bool:
    """Return whether the script has raised a class that does not say what is wrong, as tests of a recovery do."""
    return any(
        facts.by_script and facts.is_check and not _has_type(facts, _MISTAKE, _REFUSAL) and not facts.lasting
        for facts in innermost
    )


def _is_expected(facts: ExceptionFacts, outermost: ExceptionFacts) -> bool:
    """Return whether an exception is about a file that need not exist: an operation has failed where it was handled."""
    return facts.handled and facts.errno == errno.ENOENT and not outermost.is_check


def _may_pass(facts: ExceptionFacts) -> bool:
    """Return whether something speaks for it that another attempt does not raise an exception."""
    if facts.lasting or _has_type(facts, _OF_PATHS):
        return False
    sources = set(facts.failing.sources.split())
    # A library that has waited for too long has an exception of its own for that.
    steady = {THREAD} if facts.by_script else {THREAD, CLOCK}
    if _is_from_outside(facts) or sources & _UNSTEADY or (facts.is_check and sources - steady):
        return True
    if _has_type(facts, _OF_QUERY, _MISTAKE):
        return False
    if not facts.is_check and facts.is_a(_GENERAL):
        return _may_pass_natively(facts)
    if facts.types[0] in ("ValueError", _ASSERTION) and _ARGUMENTS.search(facts.place):
        return False
    return _is_numeric(facts) or _has_looked_outside(facts) or not (facts.place or facts.is_builtin)


def _may_pass_natively(facts: ExceptionFacts) -> bool:
    """Return whether an error of native code is about what is outside, rather than about its arguments or state.

    Native code checks tensors on the CPU alike in each attempt. On another device it may be that device which fails.
    """
    if _is_numeric(facts):
        return True
    if TENSORS.search(facts.text) or REFUSED_ARGUMENTS.match(facts.message):
        return False
    if _has_looked_outside(facts) or _NATIVE.search(facts.message):
        return True
    is_device = facts.failing.device not in ("", "cpu")
    if facts.failing.device == "cpu" or (_TORCH.search(facts.place) and not is_device):
        return False
    is_shared = THREAD in facts.failing.sources or _CHANGED in facts.message
    return is_shared or is_device or bool(_MEDIATORS.search(facts.place)) or not facts.place


def _is_numeric(facts: ExceptionFacts) -> bool:
    return bool(_NUMERIC.search(f"{facts.message}\n{facts.line}" if facts.is_check else facts.message))


def _has_looked_outside(facts: ExceptionFacts) -> bool:
    first_line = _LINK.sub("", facts.message.partition("\n")[0])  # hints may follow
    line = facts.line if facts.is_check else ""
    words = _NAMED if facts.failing.check else _CHECKED
    return bool(words.search(f"{facts.types[0]}\n{first_line}\n{line}"))


def _is_neutral(facts: ExceptionFacts) -> bool:
    """Return whether an exception only passes on another one, or is an exit with a mere number."""
    is_exit = facts.types[0] == "SystemExit" and bool(facts.message) and not facts.message.lstrip("-").isdecimal()
    return bool(_NEUTRAL.match(facts.types[0])) and not is_exit


def _is_from_outside(facts: ExceptionFacts) -> bool:
    # A library's check of arguments, or of a file's content, may be an OSError, but has no number.
    is_plain = facts.errno is None and facts.is_check and not _has_type(facts, _STATE_OF_SYSTEM)
    is_of_system = _has_type(facts, _SYSTEM) and not is_plain and not facts.is_a("ValueError")
    if is_of_system or _has_type(facts, _OUTSIDE, _OF_DATABASE):
        return True
    if _has_type(facts._replace(types=facts.hides), _OUTSIDE, _SYSTEM):
        return True
    return facts.errno is not None or (facts.status is not None and facts.status not in _REFUSALS)


def _has_type(facts: ExceptionFacts, *patterns: "re.Pattern[str]") -> bool:
    return any(pattern.match(kind) for pattern in patterns for kind in facts.types)
