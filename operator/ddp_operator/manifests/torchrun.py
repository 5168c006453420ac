"""Parse the user's training command: the program, and the flags of torchrun before it as typed options. Pure."""

import dataclasses
import math
import posixpath
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, Final

from ddp_pod.contract.command_line import split_python_line
from ddp_pod.contract.plan import TorchrunOptions

DEFAULT_INTERPRETER: Final = "python3"

_INTERPRETER = re.compile(r"python(\d+(\.\d+)?)?")
TORCHRUN_MODULES: Final = ("torch.distributed.run", "torch.distributed.launch")
_WITH_PIPEFAIL: Final = ("bash", "zsh")
_ONE_PIPELINE: Final = re.compile(r"[^|]*(?:\|&?\n?[^|;&\n]+)+")
"""Shell text whose only pipes are those of its last command: pipefail changes nothing but its exit code."""
_COMMAND_LINE: Final = "write the script itself as the command: [python, train.py] or [-m, package.module]"
# torchrun's flags that the operator sets, each with the remedy for the user.
OWNED_FLAGS: Final = {
    "nnodes": "set spec.nodes instead",
    "nproc-per-node": "set spec.procPerNode instead",
    "rdzv-backend": "set spec.rendezvous.backend instead",
    "rdzv-endpoint": "set spec.rendezvous.port instead; the address is that of pod 0",
    "rdzv-id": "remove it; the operator sets a unique id for every attempt",
    "rdzv-conf": "set spec.rendezvous.joinTimeoutSeconds instead",
    "standalone": "set spec.nodes to 1 instead",
    "max-restarts": "set spec.recovery.inPlaceRestarts instead",
    "node-rank": "remove it; the completion index of the pod is its node rank",
    "master-addr": "remove it; the operator sets the address of pod 0",
    "master-port": "set spec.rendezvous.port instead",
    "local-addr": "remove it; the operator sets the pod's address",
    "no-python": "write the program itself as the command instead",
    "run-path": _COMMAND_LINE,
    "shutdown-timeout": "set spec.checkpoint.graceSeconds instead",
    "signals-to-handle": "remove it; the script gets SIGTERM, and has spec.checkpoint.graceSeconds to exit",
}
OWNED_SWITCHES: Final = ("standalone", "no-python", "run-path")  # owned flags without a value
_SWITCHES: Final = ("virtual_local_rank",)
OPTIONS: Final = {
    field.name.replace("_", "-"): field.name not in _SWITCHES for field in dataclasses.fields(TorchrunOptions)
}
"""Flags that the user may set, and whether each has a value."""
_FORM: Final = {"module": False, "use-env": False, "help": False}
_SHORT: Final = {"r": "redirects", "t": "tee", "m": "module", "h": "help"}


class InvalidCommand(ValueError):
    """An invalid training command. The message names the flag and the remedy."""


@dataclasses.dataclass(frozen=True, slots=True)
class UserCommand:
    """The command of every rank.

    ``argv``: the arguments of ``python`` (``["-O", "train.py", "--lr", "1"]``), or with ``program`` the complete
    command line of another program. ``options``: the flags of torchrun before it.
    """

    interpreter: str
    argv: tuple[str, ...]
    program: bool = False
    options: TorchrunOptions = dataclasses.field(default_factory=TorchrunOptions)


def is_interpreter(argument: str) -> bool:
    """Return whether an argument is a Python interpreter, such as /usr/bin/python3.11."""
    return _INTERPRETER.fullmatch(posixpath.basename(argument)) is not None


def split_user_command(command: Sequence[str], args: Sequence[str]) -> UserCommand:
    """Parse a container's ``command`` and ``args``. Raises: InvalidCommand."""
    line = [*command, *args]
    if not line:
        raise InvalidCommand(
            "has neither command nor args, and the operator does not read the image's entrypoint; write the training "
            "command, for example [python, train.py]"
        )
    if not line[0].strip():
        raise InvalidCommand("has an empty first item; write the training command, for example [python, train.py]")
    first = line[0]
    rest = line[1:]
    name = posixpath.basename(first)
    if is_interpreter(first):
        return _split_python(first, rest)
    if name == "torchrun":
        folder = posixpath.dirname(first)
        return _split_torchrun(posixpath.join(folder, DEFAULT_INTERPRETER) if folder else DEFAULT_INTERPRETER, rest)
    if name.endswith(".py") or first == "-m" or (first.startswith("-m") and not first.startswith("--")):
        return _split_python(DEFAULT_INTERPRETER, line)
    if first.startswith("-"):
        raise InvalidCommand(f"starts with the flag {first} instead of a program; {_COMMAND_LINE}")
    return UserCommand(DEFAULT_INTERPRETER, _add_pipefail(line), program=True)


def _add_pipefail(line: Sequence[str]) -> tuple[str, ...]:
    """Return a command line whose shell fails if a command of its last pipeline does, as in ``train | tee log``."""
    is_text = len(line) > 2 and posixpath.basename(line[0]) in _WITH_PIPEFAIL and re.fullmatch("-[a-z]*c", line[1])
    if not is_text or not _ONE_PIPELINE.fullmatch(line[2].rstrip("; \n")):
        return tuple(line)
    return (line[0], "-o", "pipefail", *line[1:])


def _split_python(interpreter: str, arguments: Sequence[str]) -> UserCommand:
    try:
        line = split_python_line(arguments)
    except ValueError as error:
        raise InvalidCommand(f"{posixpath.basename(interpreter)}: {error}; {_COMMAND_LINE}") from None
    if line.kind != "module" or line.target not in TORCHRUN_MODULES:
        return UserCommand(interpreter, tuple(arguments))
    legacy = line.target == "torch.distributed.launch"
    return _split_torchrun(interpreter, line.args, flags=line.flags, legacy=legacy)


def _split_torchrun(
    interpreter: str, arguments: Sequence[str], flags: Sequence[str] = (), legacy: bool = False
) -> UserCommand:
    """Split ``torchrun [flags] script …``. ``legacy``: torch.distributed.launch, which passes --local-rank to scripts
    unless --use-env is set. Raises: InvalidCommand."""
    options, rest = _read_flags(arguments, legacy)
    owned = [f"--{name}: {OWNED_FLAGS[name]}" for name, _ in options if name in OWNED_FLAGS]
    if owned:
        raise InvalidCommand("; ".join(dict.fromkeys(owned)))
    names = {name for name, _ in options}
    if "help" in names:
        raise InvalidCommand("--help: starts no training; remove it")
    if not rest:
        raise InvalidCommand("torchrun has no script; write for example [torchrun, train.py]")
    script = ["-m", rest[0]] if "module" in names else [rest[0]]
    local_rank = ["--local-rank=${local_rank}"] if legacy and "use-env" not in names else []
    return UserCommand(interpreter, (*flags, *script, *local_rank, *rest[1:]), options=_read_options(options))


def _read_options(typed: Iterable[tuple[str, str]]) -> TorchrunOptions:
    """Return the flags that the user may set as typed values, of repeated ones the last. Raises: InvalidCommand."""
    values: dict[str, Any] = {}
    for flag, text in typed:
        name = flag.replace("-", "_")
        if name in _SWITCHES:
            values[name] = True
        elif name == "monitor_interval":
            values[name] = _read_interval(text)
        elif name.startswith("duplicate_"):
            values[name] = tuple(text.split(","))
        elif flag in OPTIONS:
            values[name] = text
    return TorchrunOptions(**values)


def _read_interval(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise InvalidCommand(f"--monitor-interval: {text!r} is no number of seconds; write for example 0.1")
    return seconds


def _read_flags(arguments: Sequence[str], legacy: bool) -> tuple[list[tuple[str, str]], list[str]]:
    """Return torchrun's flags with full names and their values, and the arguments from the script on.

    Raises: InvalidCommand.
    """
    flags = dict.fromkeys(OWNED_FLAGS, True) | dict.fromkeys(OWNED_SWITCHES, False) | OPTIONS | _FORM
    if not legacy:
        del flags["use-env"]
    options: list[tuple[str, str]] = []
    position = 0
    while position < len(arguments) and arguments[position].startswith("-") and arguments[position] != "-":
        word = arguments[position]
        position += 1
        if word == "--":
            break
        for typed, value in _split_flags(word):
            name = _find_flag(typed, flags)
            if flags[name] and value is None:
                value = "".join(arguments[position : position + 1])
                position += 1
            is_valid = position <= len(arguments) if flags[name] else value is None
            if not is_valid:
                problem = "requires argument" if flags[name] else "must not have an argument"
                raise InvalidCommand(f"--{name}: {OWNED_FLAGS.get(name, problem)}")
            options.append((name, value or ""))
    return options, list(arguments[position:])


def _split_flags(word: str) -> Iterator[tuple[str, str | None]]:
    """Yield each flag of an argument with its dashes, and the value that the same argument has."""
    if word.startswith("--"):
        typed, equals, value = word.partition("=")
        yield typed.replace("_", "-"), value if equals else None
        return
    letters: set[str] = set()
    for index, letter in enumerate(word[1:], start=2):
        if letter in letters:
            continue
        letters.add(letter)
        if OPTIONS.get(_SHORT.get(letter, "")):
            yield f"-{letter}", word[index:] or None
            return
        yield f"-{letter}", None


def _find_flag(typed: str, flags: Collection[str]) -> str:
    """Return the full name of a flag of torchrun, which may be abbreviated. Raises: InvalidCommand."""
    name = typed.lstrip("-")
    if not typed.startswith("--"):
        matches = [_SHORT[name]] if name in _SHORT else []
    else:
        matches = [name] if name in flags else [flag for flag in flags if flag.startswith(name)]
    if len(matches) == 1:
        return matches[0]
    owned = next((flag for flag in matches if flag in OWNED_FLAGS), None)
    if owned:  # the abbreviation is ambiguous, but it may mean a flag that the operator sets
        raise InvalidCommand(f"--{owned}: {OWNED_FLAGS[owned]}")
    if matches:
        candidates = ", ".join(f"--{flag}" for flag in matches)
        raise InvalidCommand(f"{typed}: is ambiguous in torchrun: {candidates}")
    raise InvalidCommand(f"{typed}: is not a flag of torchrun; write the script's flags after the script")
