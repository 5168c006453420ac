"""Find a launcher in a training command. It would start ranks of its own in each rank of the job. Pure.

A command is any number of wrappers, a launcher with its options, and a script with its options. Only certain launchers
are found, not those behind a variable, a condition, or an unknown program or option. For these the launcher in the pod
observes the process groups.
"""

import posixpath
import re
import shlex
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any, Final, NamedTuple

from ddp_operator.api.yaml_writer import format_list
from ddp_operator.manifests.shell import Word, list_commands
from ddp_operator.manifests.torchrun import DEFAULT_INTERPRETER, is_interpreter
from ddp_pod.contract.command_line import split_python_line

SHELLS: Final = ("sh", "bash", "dash", "zsh", "ash", "ksh")
_MAX_SHOWN: Final = 160
"""Characters of a command in a message."""
_MAX_WORDS: Final = 1000
_MAX_SHELLS: Final = 4
"""Shells within shells that are searched."""
_ASSIGNMENT: Final = re.compile(r"[A-Za-z_]\w*\+?=")
_WHICH: Final = re.compile(r"[$`]\(?(?:which|command -v|type -[pP]) (\S+?)[)`]")
# An address of the same machine, or the rank of the first one.
_LOCAL: Final = re.compile(r"0$|localhost\b|127\.|\[?::1\b")
# Variables with which torchrun, or a command that starts it, gets several machines.
_TORCHRUN_VARIABLES: Final = ("PET_NNODES", "PET_RDZV_ENDPOINT")
_MODULE_VARIABLES: Final = ("NNODES",)

Replace = Callable[[int, int, Sequence[str]], str | tuple[str, ...]]
"""Returns the whole command, or the script's text, with words instead of those from an index up to another one."""


class NestedLauncher(NamedTuple):
    """A launcher in a command."""

    name: str
    several_nodes: bool
    """Whether its options concern several machines."""
    processes: str
    """The number of ranks in its options; empty without one."""
    options: Mapping[str, str]
    typed: str
    """The launcher with its options and the script."""
    instead: str
    """What to write for ``typed``."""
    result: str | tuple[str, ...]
    """The whole command, or the script's text, with that."""
    file: str = ""
    """The script that contains it; empty for the command itself."""


class _Launcher(NamedTuple):
    is_script: bool
    module: str = ""
    values: frozenset[str] = frozenset()
    switches: frozenset[str] = frozenset()
    sizes: frozenset[str] = frozenset()
    machines: frozenset[str] = frozenset()
    processes: frozenset[str] = frozenset()


ReadScript = Callable[[str], str | None]
"""Returns the text of a shell script; None if it cannot be read."""


class _Line(NamedTuple):
    words: Sequence[Word]
    replace: Replace
    read_script: ReadScript
    depth: int


def find_nested_launcher(
    command: Sequence[str], variables: Collection[str] = (), read_script: ReadScript = lambda path: None
) -> NestedLauncher | None:
    """Return the launcher in a command line. ``variables``: the names of the container's environment variables.

    A command of very many words is not searched.
    """
    if len(command) > _MAX_WORDS:
        return None
    words = [Word(text, index, index + 1, expands="$(" in text) for index, text in enumerate(command)]

    def replace(start: int, end: int, new: Sequence[str]) -> tuple[str, ...]:
        return (*command[:start], *new, *command[end:])

    found = _search_line(_Line(words, replace, read_script, 0))
    if found is None:
        return None
    text = found.result if isinstance(found.result, str) else "\n".join(found.result)
    names = {*variables, *re.findall(r"\b([A-Z_]+)=(?!1\b)", text)}
    sizes = _MODULE_VARIABLES if _read_table().launchers[found.name].module else _TORCHRUN_VARIABLES
    return found if names.isdisjoint(sizes) else found._replace(several_nodes=True)


def explain_nested_launcher(found: NestedLauncher, *, nodes: int, nproc: int, has_args: bool) -> str:
    """Return the problem of a launcher in each rank of a job, with the remedy; empty if it may work.

    ``nproc``: the ranks of a pod. ``has_args``: a part of the command is in the container's ``args``.
    """
    counted = found.processes if found.processes.isdecimal() else ""
    if found.several_nodes:
        if nproc == 1 or counted == "1" or not found.processes:
            return ""
        problem = (
            f"each of the {nproc} ranks of a pod would run {found.name}, which starts {found.processes} ranks: "
            "WORLD_SIZE and RANK count ranks here, not pods"
        )
    else:
        problem = (
            f"{found.name} would start separate ranks in each of the {nodes * nproc} ranks that the operator starts, "
            "and these do not train together"
        )
    where = f"in {found.file}, " if found.file else ""
    remedy = f"{where}write `{_shorten(found.instead)}` instead of `{_shorten(found.typed)}`"
    if isinstance(found.result, tuple) and len(line := format_list(found.result)) <= _MAX_SHOWN:
        remedy = f"write {line} as the command" + (", and remove args" if has_args else "")
    if counted not in ("", str(nproc)) and not found.several_nodes:
        remedy += f", and set spec.procPerNode: {counted}"
    return f"{problem}; {remedy}; for separate runs set spec.processGroupPolicy: Ignore"


def _shorten(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN // 2]} … {text[-_MAX_SHOWN // 2 :]}"


def _search_text(
    text: str, finish: Callable[[str], str | tuple[str, ...]], read_script: ReadScript, depth: int
) -> NestedLauncher | None:
    """Search shell text. ``finish`` returns the result for a changed text."""
    for words, conditional in list_commands(text):

        def replace(start: int, end: int, new: Sequence[str], words: Sequence[Word] = words) -> str | tuple[str, ...]:
            is_last = end == len(words)
            inserted = shlex.join(new) + ("" if is_last else " ") if new else ""
            rest = text[words[-1].end :] if is_last else text[words[end].start :]
            return finish(text[: words[start].start] + inserted + rest)

        found = None if conditional else _search_line(_Line(words, replace, read_script, depth))
        if found is not None:
            return found
    return None


def _search_line(line: _Line) -> NestedLauncher | None:
    """Search one command."""
    words = line.words
    position: int | None = 0
    while position is not None and position < len(words):
        word = words[position]
        program = _find_program(word)
        if _ASSIGNMENT.match(word.text):
            position += 1
            continue
        if program in SHELLS:
            return _search_shell(line, position + 1)
        if program in ("source", ".") or (program.endswith(".sh") and program not in _read_table().wrappers):
            return _search_script(line, position + (not program.endswith(".sh")))
        if program == "eval":
            return _search_word(line, position + 1)
        if program == "env" and position + 1 < len(words) and words[position + 1].text in ("-S", "--split-string"):
            return _search_word(line, position + 2)
        if is_interpreter(program) or program == "-m":
            return _search_python(line, position, [] if program == "-m" else [word.text])
        launcher = _match_launcher(program, words, position + 1)
        if launcher is not None:
            folder = "" if word.expands else posixpath.dirname(word.text)
            return _read_launcher(*launcher, line, position, [posixpath.join(folder, DEFAULT_INTERPRETER)])
        position = _skip_wrapper(program, words, position + 1)
    return None


def _find_program(word: Word) -> str:
    """Return the name of the program that a word names; empty if that depends on a variable."""
    which = _WHICH.fullmatch(word.text)
    name = posixpath.basename(which[1] if which else word.text)
    return "" if word.expands and "$" in name else name


def _skip_wrapper(program: str, words: Sequence[Word], start: int) -> int | None:
    """Return where the command of a wrapper begins; None if that is unknown."""
    wrappers = _read_table().wrappers
    position = start
    if program not in wrappers:
        # Options of the program may precede its subcommand, as in `uv --offline run`.
        position = next((index for index in range(start, len(words)) if words[index].text[:1] != "-"), len(words))
        program = " ".join([program, *(word.text for word in words[position : position + 1])])
        position += 1
    if program not in wrappers:
        # What follows -- is mostly a command, as in `doppler run -- torchrun`.
        return next((index + 1 for index in range(start, len(words)) if words[index].text == "--"), None)

    values = wrappers[program]
    while position < len(words) and words[position].text.startswith("-"):
        option = words[position].text
        if option == "-m" and option not in values:
            return position
        position += 1
        if option in ("--", "--args"):
            break
        name = option if option.startswith("--") or option in values else option[:2]
        if option == name and (option in values or "*" in values) and "=" not in option:
            position += 1
    return position + ("1" in values)


def _search_shell(line: _Line, position: int) -> NestedLauncher | None:
    """Search the text that a shell gets with -c."""
    has_text = False
    while position < len(line.words) and line.words[position].text[:1] in ("-", "+"):
        option = line.words[position].text
        is_long = option.startswith("--")
        has_text = has_text or (not is_long and "c" in option)
        has_value = option in ("--rcfile", "--init-file") if is_long else "o" in option.lower()
        position += 2 if has_value else 1
    return _search_word(line, position) if has_text else _search_script(line, position)


def _search_word(line: _Line, position: int) -> NestedLauncher | None:
    """Search a word that is shell text."""
    if position >= len(line.words) or line.depth == _MAX_SHELLS:
        return None
    return _search_text(
        line.words[position].text,
        lambda changed: line.replace(position, position + 1, (changed,)),
        line.read_script,
        line.depth + 1,
    )


def _search_script(line: _Line, position: int) -> NestedLauncher | None:
    """Search a shell script, if it can be read."""
    path = "" if position >= len(line.words) or line.depth == _MAX_SHELLS else line.words[position].text
    text = line.read_script(path) if path else None
    found = _search_text(text, lambda changed: changed, line.read_script, line.depth + 1) if text else None
    return found._replace(file=found.file or path) if found is not None else None


def _search_python(line: _Line, first: int, interpreter: Sequence[str]) -> NestedLauncher | None:
    """Search what Python runs. ``first``: the index of the interpreter, or of its first argument without one."""
    words = line.words
    try:
        python = split_python_line([word.text for word in words[first + len(interpreter) :]])
    except ValueError:
        return None
    start = len(words) - len(python.args)
    program = _find_program(words[start - 1]) if python.kind == "script" else ""
    if python.kind == "module":
        program = _read_table().modules.get(python.target, "")
        if f"-m {python.target}" in _read_table().wrappers:  # such as a debugger
            inner = _skip_wrapper(f"-m {python.target}", words, start)
            return _search_python(line, inner, []) if inner is not None else None
    launcher = _match_launcher(program, words, start)
    return _read_launcher(*launcher, line, first, [*interpreter, *python.flags]) if launcher else None


def _match_launcher(program: str, words: Sequence[Word], start: int) -> tuple[str, int] | None:
    """Return the launcher that a program with its subcommands is, and the index of its first option."""
    for count in (2, 1, 0):
        name = " ".join([program, *(word.text for word in words[start : start + count])])
        if name in _read_table().launchers:
            return name, start + count
    return None


def _read_launcher(name: str, start: int, line: _Line, first: int, python: Sequence[str]) -> NestedLauncher | None:
    """Return a launcher; None if its end is uncertain.

    ``start``: the index of its first option. ``first``: that of its first word. ``python``: an interpreter with flags.
    """
    launcher = _read_table().launchers[name]
    words = line.words
    new = [*python, "-m", launcher.module]
    values: dict[str, str] = {}
    end = start
    if not launcher.module:
        end = _read_options(launcher, words, start, values)
        if end >= len(words) or (words[end].splits and not re.search("[/.]", words[end].text)):
            return None
        is_module = not values.keys().isdisjoint(("m", "module"))
        new = [*python, "-m"] if is_module else [*python]
        new = new if launcher.is_script and "no-python" not in values else []
    return NestedLauncher(
        name,
        _concerns_several_nodes(launcher, values),
        next((values[option] for option in launcher.processes if option in values), ""),
        values,
        typed=" ".join(word.text for word in words[first : end + 1]),
        instead=" ".join([*new, *(word.text for word in words[end : end + 1])]),
        result=line.replace(first, end, new),
    )


def _read_options(launcher: _Launcher, words: Sequence[Word], position: int, values: dict[str, str]) -> int:
    """Collect the values of options, empty for switches. Returns the index after them; the last if one is unknown."""
    known = launcher.values | launcher.switches
    while position < len(words) and words[position].text.startswith("-"):
        typed, equals, value = words[position].text.partition("=")
        position += 1
        if typed == "--":
            break
        name = typed.lstrip("-").replace("_", "-")
        if f"{name}+" in known:
            position += 2
            continue
        if name not in known and not typed.startswith("--") and name[:1] in launcher.values:
            value = name[1:]
            equals = "="
            name = name[0]
        matches = [name] if name in known else [option for option in known if option.startswith(name)]
        if len(matches) != 1 and not equals:
            return len(words)
        name = matches[0] if len(matches) == 1 else name
        if name in launcher.values and not equals:
            value = "".join(word.text for word in words[position : position + 1])
            position += 1
        values[name] = value
    return position


def _concerns_several_nodes(launcher: _Launcher, values: Mapping[str, str]) -> bool:
    """Return whether options concern several machines. A number of machines takes precedence over addresses."""
    if "standalone" in values:
        return False
    counts = [values[option] for option in launcher.sizes if option in values]
    if counts:
        return counts[-1] not in ("1", "1:1")
    return any(not _LOCAL.match(values[option]) for option in launcher.machines if option in values)


class _Table(NamedTuple):
    launchers: Mapping[str, _Launcher]
    modules: Mapping[str, str]
    wrappers: Mapping[str, frozenset[str]]


@cache
def _read_table() -> _Table:
    raw: dict[str, Any] = tomllib.loads((resources.files(__package__) / "launchers.toml").read_text(encoding="utf-8"))
    launchers: dict[str, _Launcher] = {}
    fields = ("values", "switches", "sizes", "machines", "processes")
    for kind in ("script", "program"):
        launcher = _Launcher(kind == "script", "", *(frozenset(raw[kind][field].split()) for field in fields))
        launchers |= dict.fromkeys(raw[kind]["programs"], launcher)
    for name, module in raw["module"].items():
        launchers[name] = _Launcher(is_script=False, module=module)
    wrappers = {name: frozenset(values.split()) for name, values in raw["wrapper"].items()}
    return _Table(launchers, raw["python"], wrappers)
