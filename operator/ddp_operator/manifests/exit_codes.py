"""Shell lines that hide the exit code of the program: run pipes with pipefail, and describe what else hides it. Pure.

A rank whose exit code is hidden may still fail unnoticed in a script file: the launcher reports it when the rank ends.
"""

import posixpath
import re
from collections.abc import Sequence
from typing import Final, NamedTuple

from ddp_operator.manifests.shell import Word, read_items

_SHELLS: Final = ("bash", "zsh", "sh", "dash", "ash")
_WITH_PIPEFAIL: Final = ("bash", "zsh")
_SEPARATORS: Final = frozenset((";", "\n", "&", "&&", "||"))
_PIPES: Final = frozenset(("|", "|&"))
_FALLBACK: Final = re.compile(r"(?:true|:|exit 0)$|echo\b")
_ERREXIT: Final = re.compile(r"\bset +(?:-[a-z]{0,8}e|-o +errexit)")
# The line handles the exit code of its pipes itself.
_HANDLED: Final = re.compile(r"pipefail|PIPESTATUS|pipestatus")


class _ShellLine(NamedTuple):
    """The line that a shell executes with -c. ``flag``: the index of -c; ``words``: its tokens; ``last``: the index of
    the first token of its last pipeline; ``stops``: whether the shell ends when a command fails."""

    shell: str
    flag: int
    words: list[str]
    last: int
    stops: bool

    @property
    def has_pipe(self) -> bool:
        """Whether a pipe decides about its exit code."""
        return not _PIPES.isdisjoint(self.words[self.last :])

    @property
    def may_set_pipefail(self) -> bool:
        """Whether pipefail changes nothing but that exit code."""
        return self.shell in _WITH_PIPEFAIL and self.has_pipe and _PIPES.isdisjoint(self.words[: self.last])


def add_pipefail(argv: Sequence[str]) -> tuple[str, ...]:
    """Return a command line whose shell fails if a command of its last pipeline does.

    Unchanged: a line that handles this itself, and one with a pipe before its last pipeline, such as a condition whose
    result would change.
    """
    line = _split_line(argv)
    if line is None or not line.may_set_pipefail:
        return tuple(argv)
    return (*argv[: line.flag], "-o", "pipefail", *argv[line.flag :])


def describe_hidden_exit(argv: Sequence[str]) -> str:
    """Return what hides the exit code of a shell line, and the remedy; empty if nothing does."""
    line = _split_line(argv)
    if line is None:
        return ""
    if line.words[-1:] == ["&"]:
        return "its last command runs in the background, so the rank ends at once; remove the & at its end"
    before = line.words[line.last - 1] if line.last else ""
    command = " ".join(line.words[line.last :])
    is_fallback = before == "||" or (before in (";", "\n") and not line.stops)
    if is_fallback and _FALLBACK.match(command):
        return f"its exit code is that of `{command}`, also if the program fails; remove that command"
    if not line.has_pipe or line.may_set_pipefail:
        return ""
    shell = line.shell if line.shell in _WITH_PIPEFAIL else "bash"
    return f"its exit code is that of the last command of a pipe; write [{shell}, -c, 'set -o pipefail; …']"


def _split_line(argv: Sequence[str]) -> _ShellLine | None:
    """Return the line that a shell executes; None if there is none, or if it handles its pipes itself."""
    shells = (index for index, word in enumerate(argv[:-2]) if posixpath.basename(word) in _SHELLS)
    start = next(shells, None)
    if start is None:
        return None
    flag = next((index for index in range(start + 1, len(argv) - 1) if re.fullmatch("-[a-z]*c", argv[index])), None)
    text = "" if flag is None else argv[flag + 1]
    if flag is None or _HANDLED.search(" ".join(argv[start : flag + 2])):
        return None
    words = [item.text if isinstance(item, Word) else item for item in read_items(text)]
    while words and not words[-1].strip(";\n"):
        words.pop()
    last = max((index + 1 for index, word in enumerate(words[:-1]) if word in _SEPARATORS), default=0)
    stops = "e" in argv[flag] or "-e" in argv[start:flag] or _ERREXIT.search(text) is not None
    return _ShellLine(posixpath.basename(argv[start]), flag, words, last, stops)
