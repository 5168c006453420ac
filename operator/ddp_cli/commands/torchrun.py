"""Translate a command line of torchrun, typed at `ddp`, into the command line of `ddp`."""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from ddp_operator.manifests.torchrun import is_interpreter
from ddp_operator.manifests.typed_torchrun import FORM_FLAGS, TypedFlag, count_launcher_arguments, split_flags

# Command of `ddp` -> flag of torchrun -> flag of the command.
_RENAMED: Final[Mapping[str, Mapping[str, str]]] = {
    "run": {
        "nproc-per-node": "--procs",
        "nnodes": "--nodes",
        "max-restarts": "--max-restarts",
        "log-dir": "--runs-dir",
    },
    "drill": {"nproc-per-node": "--procs", "nnodes": "--nodes"},
    "submit": {"nproc-per-node": "--procs", "nnodes": "--nodes"},
    "init": {"nproc-per-node": "--gpus", "nnodes": "--nodes"},
}
_NUMBERS: Final = ("nproc-per-node", "nnodes", "max-restarts")
_NOT_A_LAUNCHER: Final = (".py", ".yaml", ".yml", ".json")


@dataclass(frozen=True, slots=True)
class _Translation:
    """The replacement of a command line: arguments of `ddp` and of the script, and the torchrun flags to explain."""

    arguments: list[str]
    script_arguments: list[str]
    flags: list[TypedFlag]
    reasons: list[str] = field(default_factory=list)


def explain_torchrun(command: str, arguments: Sequence[str], unknown: Sequence[str], extra: Sequence[str]) -> str:
    """Return the command line to type instead of one with torchrun or its flags; empty if there are none.

    ``arguments``: after ``command``. ``unknown``: those that the command does not know. ``extra``: those
    after --.
    """
    if command not in _RENAMED:
        return ""
    renamed = _RENAMED[command]
    translation = _translate_launcher(arguments) or _translate_flags(arguments, unknown)
    if translation is None:
        return ""

    line = ["ddp", command, *translation.arguments, *_rename_flags(translation.flags, renamed)]
    script_arguments = [*translation.script_arguments, *extra]
    if script_arguments:
        line += ["--", *script_arguments]
    reasons = [*translation.reasons, *_explain_flags(translation.flags, renamed)]
    return f"{'; '.join(reasons)}. Type: {shlex.join(line)}"


def _translate_launcher(arguments: Sequence[str]) -> _Translation | None:
    """Translate ``ddp run torchrun [flags] script …``; None: no launcher is named."""
    start, end = _find_launcher(arguments)
    if start == end:
        return None
    flags, rest = split_flags(arguments[end:], until_script=True)
    script = rest[:1] or ["train.py"]
    is_module = any(flag.name in ("module", "m") for flag in flags)
    return _Translation(
        arguments=[*arguments[:start], *(["-m"] if is_module else []), *script],
        script_arguments=rest[1:],
        flags=flags,
        reasons=[f"{' '.join(arguments[start:end])}: ddp starts the script with torchrun itself; name only the script"],
    )


def _translate_flags(arguments: Sequence[str], unknown: Sequence[str]) -> _Translation | None:
    """Translate ``ddp run script --nproc_per_node 2``; None: no flag of torchrun is among the unknown arguments."""
    typed = {argument.partition("=")[0] for argument in unknown}
    flags, line = split_flags(arguments, only=typed)
    if not flags:
        return None
    script_arguments = split_flags(unknown, only=typed).rest
    for argument in reversed(script_arguments):
        last = len(line) - 1 - line[::-1].index(argument)
        del line[last]
    return _Translation(line, script_arguments, flags)


def _find_launcher(arguments: Sequence[str]) -> tuple[int, int]:
    """Return start and end of the arguments that name torchrun or Python instead of a script; equal if none do."""
    for index, argument in enumerate(arguments):
        length = count_launcher_arguments(arguments[index : index + 3])
        if not length and is_interpreter(argument) and arguments[index - 1] != "--python":
            length = 1
        if length:
            return index, index + length
        if argument == "-m" or argument.endswith(_NOT_A_LAUNCHER):
            break
    return 0, 0


def _rename_flags(flags: Iterable[TypedFlag], renamed: Mapping[str, str]) -> list[str]:
    """Return the flags that `ddp` also has, under the names of `ddp`."""
    arguments: list[str] = []
    for flag in flags:
        if flag.name not in renamed:
            continue
        value = flag.value
        if flag.name in _NUMBERS:
            value = value.partition(":")[0]  # the minimum of an elastic size
            value = value if value.isdigit() else ""
        if value:
            arguments += [renamed[flag.name], value]
    return arguments


def _explain_flags(flags: Sequence[TypedFlag], renamed: Mapping[str, str]) -> list[str]:
    reasons = [f"use {renamed[flag.name]} for torchrun's {flag.typed}" for flag in flags if flag.name in renamed]
    dropped = [flag.typed for flag in flags if flag.name not in renamed and flag.name not in FORM_FLAGS]
    if dropped:
        reasons.append(f"leave out torchrun's {', '.join(dict.fromkeys(dropped))}")
    return reasons
