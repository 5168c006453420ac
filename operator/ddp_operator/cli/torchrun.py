"""What to type in place of a command line of torchrun, which `ddp` itself runs in every pod."""

import re
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Final

from ddp_operator.manifests.torchrun import TORCHRUN_FLAGS, TORCHRUN_MODULES

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
_FORM: Final = ("module", "m")
_NUMBERS: Final = ("nproc-per-node", "nnodes", "max-restarts")
_INTERPRETER: Final = re.compile(r"python(\d+(\.\d+)?)?")


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag of torchrun as it was typed."""

    name: str
    """With dashes, without the two in front."""
    typed: str
    value: str = ""


def explain_torchrun(command: str, words: Sequence[str], unknown: Sequence[str], extra: Sequence[str]) -> str:
    """Return what to type for a command line with torchrun or its flags; empty where there are none.

    ``words``: those after ``command``. ``unknown``: those of them that it does not know. ``extra``: those after --.
    """
    if command not in _RENAMED:
        return ""
    start, end = _find_launcher(words)
    if end:
        flags, rest = _split_flags(words[end:], until_script=True)
        line = [
            *words[:start],
            *(["-m"] if any(flag.name in _FORM for flag in flags) else []),
            *(rest[:1] or ["train.py"]),
        ]
        arguments = rest[1:]
        reasons = [f"{' '.join(words[start:end])}: ddp itself runs the script with torchrun; name the script alone"]
    else:
        typed = {word.partition("=")[0] for word in unknown}
        flags, line = _split_flags(words, only=typed)
        _, arguments = _split_flags(unknown, only=typed)
        if not flags:
            return ""
        for word in reversed(arguments):
            line.reverse()
            line.remove(word)
            line.reverse()
        reasons = []
    line = ["ddp", command, *line, *_translate(flags, _RENAMED[command])]
    script_arguments = [*arguments, *extra]
    line += ["--", *script_arguments] if script_arguments else []
    return "; ".join([*reasons, *_explain(flags, _RENAMED[command])]) + f". Type: {shlex.join(line)}"


def _find_launcher(words: Sequence[str]) -> tuple[int, int]:
    """Return where torchrun, or Python, is named in place of a script, and where that ends; 0, 0: nowhere."""
    for index, word in enumerate(words):
        module = words[index + 1] if index + 1 < len(words) and word == "-m" else ""
        if module in TORCHRUN_MODULES:
            return index, index + 2
        name = PurePath(word).name
        if name == "torchrun":
            return index, index + 1
        if _INTERPRETER.fullmatch(name):
            of_torchrun = list(words[index + 1 : index + 2]) == ["-m"] and words[index + 2 : index + 3]
            return index, index + (3 if of_torchrun and of_torchrun[0] in TORCHRUN_MODULES else 1)
        if word.endswith((".py", ".yaml", ".yml", ".json")) or word == "-m":
            break
    return 0, 0


def _split_flags(
    words: Sequence[str], *, until_script: bool = False, only: Collection[str] | None = None
) -> tuple[list[Flag], list[str]]:
    """Return torchrun's flags and the words beside them.

    ``until_script``: from the script on all words are its own. ``only``: those that may be flags of torchrun.
    """
    flags: list[Flag] = []
    rest: list[str] = []
    remaining = list(words)
    while remaining:
        word = remaining.pop(0)
        typed, equals, value = word.partition("=")
        name = typed.removeprefix("--").replace("_", "-") if typed.startswith("--") else typed.removeprefix("-")
        known = typed.startswith("-") and name in TORCHRUN_FLAGS and (only is None or typed in only)
        if not known or (rest and until_script):
            rest.append(word)
            continue
        if TORCHRUN_FLAGS[name] and not equals and remaining and not remaining[0].startswith("-"):
            value = remaining.pop(0)
        flags.append(Flag(name, typed, value))
    return flags, rest


def _translate(flags: Iterable[Flag], renamed: Mapping[str, str]) -> list[str]:
    words: list[str] = []
    for flag in flags:
        value = flag.value.partition(":")[0] if flag.name in _NUMBERS else flag.value
        usable = value.isdigit() if flag.name in _NUMBERS else bool(value)
        if flag.name in renamed and usable:
            words += [renamed[flag.name], value]
    return words


def _explain(flags: Sequence[Flag], renamed: Mapping[str, str]) -> list[str]:
    reasons = [f"use {renamed[flag.name]} for torchrun's {flag.typed}" for flag in flags if flag.name in renamed]
    dropped = [flag.typed for flag in flags if flag.name not in renamed and flag.name not in _FORM]
    if dropped:
        reasons.append(f"leave out torchrun's {', '.join(dict.fromkeys(dropped))}")
    return reasons
