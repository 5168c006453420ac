"""Whether every attempt would fail as this one did, by what a rank has recorded of its exception.

A mistake in the script, its configuration or its data depends on nothing that another attempt changes. As soon as a
service, a peer, a device, memory, a helper process or a volume took part, another attempt may succeed.
"""

import re
from collections.abc import Sequence
from typing import Final

from ..base.exceptions import LIBRARY, ExceptionFacts
from ..contract.failure_table import SIGNIFICANT_SECONDS
from .kinds import COLLECTIVES, NON_FINITE, OTHER_SIZE, PEERS, REFUSED_ARGUMENTS, TENSORS, FailureKind

_GENERAL: Final = "RuntimeError"
_ASSERTION: Final = "AssertionError"
_EXIT: Final = "SystemExit"
# Builtin classes, also those of libraries that derive from them.
_MISTAKES: Final = {
    "ArithmeticError", _ASSERTION, "AttributeError", "ImportError", "LookupError", "NameError",
    "NotImplementedError", "RecursionError", "StopIteration", "SyntaxError", "TypeError",
    "sqlite3.ProgrammingError",
}  # fmt: skip
_WRONG_VALUES: Final = {
    "ValueError", "_pickle.PicklingError", "pickle.PicklingError", "configparser.Error", "argparse.ArgumentError",
    "re.error", "re.PatternError", "locale.Error",
    "pydantic_core._pydantic_core.ValidationError",
}  # fmt: skip
# A library's ValueError may be about what a service has answered; floating point numbers depend on their order.
_OUTSIDE: Final = {
    "OSError",
    "EOFError",
    "MemoryError",
    "FloatingPointError",
    "UnicodeDecodeError",
    "threading.BrokenBarrierError",
}
# What passes on another exception of the chain.
_NEUTRAL: Final = {
    _GENERAL, _EXIT, "ExceptionGroup", "BaseExceptionGroup", "Exception",
    "multiprocessing.pool.RemoteTraceback", "concurrent.futures.process._RemoteTraceback",
}  # fmt: skip
# Other packages' checks may be about what a service has answered.
_CHECKING_LIBRARY: Final = re.compile(r"[/\\]torch[/\\]|[/\\]lib(64)?[/\\]python3[^/\\]*[/\\](?!(site|dist)-packages)")
# Modules of torch whose native calls check arguments and states, and need nothing from outside.
_TORCH: Final = re.compile(
    r"[/\\]torch[/\\](amp|autograd|nn[/\\](functional|modules|utils[/\\](?!rnn))|optim|functional|_tensor)\b"
)
_ARGUMENTS: Final = re.compile(r"[/\\]torch[/\\](amp|nn|optim)[/\\]")  # whose ValueErrors are about these
# Modules that pass on errors of peers, processes, devices and files.
_MEDIATORS: Final = re.compile(
    r"[/\\](torch[/\\](distributed|multiprocessing|utils[/\\]data|cuda|hub|serialization|_utils)"
    r"|python3[^/\\]*[/\\](multiprocessing[/\\](?!context)|asyncio[/\\](?!runners)|concurrent|http|urllib|subprocess"
    r"|socket|ssl))\b"
)
# What a message, an assertion or the line of a raise may have looked at: the script has checked something outside.
_CHECKED: Final = re.compile(
    r"(?i)exists?\b|not found|no such|is_?(file|dir)|available|alive|return_?code|status|timed? ?out|connect|network"
    r"|download|server|https?\b|\bmount|disk|space left|memory|gpu|cuda|nccl|\b(b?locked|busy|ready|retr(y|ies))\b"
)
# A clock in a condition, or a call of other functions than those that need nothing but their arguments.
_UNSTABLE: Final = re.compile(
    r"(?i)\b\w*time\b|monotonic|perf_counter|deadline|\b(?!(?:abs|all|any|endswith|float|get_rank|get_world_size|int"
    r"|isinstance|item|len|max|min|set|sorted|startswith|str|sum)\()\w+\("
)
_LINK: Final = re.compile(r"(visit|see)\shttps?://\S+")  # to the documentation of an error
_NUMERIC: Final = re.compile(r"(?i)finite|is_?nan|is_?inf|\bnan\b|\binf\b|probabilit|\ball\selements\sof\b")
# The same for errors of torch's native code.
_NATIVE: Final = re.compile(
    rf"(?i){PEERS}|cu(da|dnn|blas|solver|sparse|fft)|\b(hip|roc|miopen|gpu|nvml|mps)|\bxpu|driver|enforce"
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
    is_known = any(_is_mistake(facts) and (facts is chain[0] or not facts.handled) for facts in chain)
    return is_known and all(_is_mistake(facts) or _is_neutral(facts) for facts in chain)


def _is_mistake(facts: ExceptionFacts) -> bool:
    if facts.lasting:
        return True
    if _is_from_outside(facts):
        return False
    # Not if the script itself has raised it, or speaks of something outside: an object may only stand beside that.
    if facts.failing.advice and not facts.by_script and not _has_looked_outside(facts):
        return True
    if facts.types[0] == _GENERAL:
        if facts.by_script or _NUMERIC.search(facts.message):
            return False
        is_refused = bool(TENSORS.search(facts.text) or REFUSED_ARGUMENTS.match(facts.message))
        return is_refused or _is_refusal(facts)
    has_checked = facts.types[0] == _ASSERTION or (facts.is_a(_GENERAL) and _is_raised(facts))
    if has_checked and _is_refusal(facts):
        return True
    if facts.is_a(_ASSERTION) or not _WRONG_VALUES.isdisjoint(facts.types):
        is_own = facts.types[0] in (*_MISTAKES, *_WRONG_VALUES) or _is_of_script(facts) or _is_lookup(facts)
        has_checked_arguments = facts.types[0] == "ValueError" and bool(_ARGUMENTS.search(facts.place))
        is_local = has_checked_arguments or not _has_looked_outside(facts)
        return is_own and is_local and not _NUMERIC.search(f"{facts.message}\n{facts.line}")
    return not _MISTAKES.isdisjoint(facts.types) or (facts.types[0] == _EXIT and _has_refused(facts))


def _has_refused(facts: ExceptionFacts) -> bool:
    """Return whether the script has ended itself with a text, by a condition that is known: as an assertion does."""
    condition = facts.failing.check
    is_text = not facts.message.lstrip("-").isdecimal()
    is_known = bool(condition) and facts.by_script and is_text
    if not is_known or _has_looked_outside(facts) or _CHECKED.search(condition) or _UNSTABLE.search(condition):
        return False
    return not _NUMERIC.search(f"{facts.message}\n{condition}")


def _is_raised(facts: ExceptionFacts) -> bool:
    return facts.line.startswith(("raise ", "assert "))


def _is_lookup(facts: ExceptionFacts) -> bool:
    """Return whether a library's class is of several kinds, as NumPy's AxisError is an IndexError, too."""
    return not _MISTAKES.difference({_ASSERTION}).isdisjoint(facts.types)


def _has_looked_outside(facts: ExceptionFacts) -> bool:
    return bool(_CHECKED.search(_LINK.sub("", f"{facts.message}\n{facts.line}")))


def _is_refusal(facts: ExceptionFacts) -> bool:
    """Return whether an error is a library's check of its arguments or state, rather than about what is outside.

    Native code checks tensors on the CPU alike in each attempt. On another device it may be that device which fails.
    """
    first_line = facts.message.partition("\n")[0]  # hints may follow
    if _has_looked_outside(facts._replace(message=first_line)):
        return False
    if facts.failing.device == "cpu":
        return not _NATIVE.search(facts.message)
    if _MEDIATORS.search(facts.place):
        return False
    if _is_raised(facts):
        return bool(_CHECKING_LIBRARY.search(facts.place))
    return bool(_TORCH.search(facts.place)) and not _NATIVE.search(facts.message)


def _is_neutral(facts: ExceptionFacts) -> bool:
    return not _is_from_outside(facts) and (facts.types[0] in _NEUTRAL or _is_of_script(facts))


def _is_from_outside(facts: ExceptionFacts) -> bool:
    if facts.hides and _MISTAKES.union(_WRONG_VALUES).isdisjoint(facts.hides):
        return True
    return facts.errno is not None or facts.status is not None or not _OUTSIDE.isdisjoint(facts.types)


def _is_of_script(facts: ExceptionFacts) -> bool:
    """Return whether the script itself has raised an exception, of whatever class."""
    return bool(facts.place) and not LIBRARY.search(facts.place)
