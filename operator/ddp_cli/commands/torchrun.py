"""Explain what `ddp` has instead of torchrun and its flags, where a user types them in a command line of `ddp`."""

from collections.abc import Sequence
from typing import Final

from ddp_operator.manifests.torchrun import is_interpreter
from ddp_operator.manifests.typed_torchrun import FORM_FLAGS, count_launcher_arguments, split_flags

# Flag of torchrun -> flags of `ddp`; a command may lack the first.
_RENAMED: Final = {
    "nproc-per-node": ("--procs", "--gpus"),
    "nnodes": ("--nodes",),
    "max-restarts": ("--max-restarts",),
    "log-dir": ("--runs-dir",),
}
_NOT_A_LAUNCHER: Final = (".py", ".yaml", ".yml", ".json")


def explain_torchrun(command: str, arguments: Sequence[str], unknown: Sequence[str], own: Sequence[str]) -> str:
    """Return what to type instead of torchrun or its flags; empty if the command line has none.

    ``arguments``: after ``command``. ``unknown``: those that the command does not know. ``own``: its options.
    """
    start, end = _find_launcher(arguments)
    launcher = " ".join(arguments[start:end])
    reasons = [f"{launcher}: ddp starts the script with torchrun itself; name only the script"] if launcher else []
    flags = split_flags(arguments[end:], until_script=True).flags if launcher else split_flags(unknown).flags
    for flag in flags:
        name = next((name for name in _RENAMED.get(flag.name, ()) if name in own), "")
        if name:
            reasons.append(f"use {name} for torchrun's {flag.typed}")
        elif flag.name not in FORM_FLAGS:
            reasons.append(f"leave out torchrun's {flag.typed}")
    if not reasons:
        return ""
    return f"{'; '.join(reasons)}. Arguments of the script follow --, as in: ddp {command} train.py --nodes 2 -- --lr 1"


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
