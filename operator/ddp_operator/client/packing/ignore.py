"""Match patterns of .gitignore as git does: against one path, after a walk has accepted all its parents."""

import re
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple


class Rules:
    """The patterns of one or more .gitignore files; later patterns take precedence."""

    def __init__(self, lines: Iterable[str]) -> None:
        self._patterns = [pattern for line in lines if (pattern := _parse(line)) is not None]
        # Most paths match nothing, and one expression is faster than twenty.
        self._names = _join(pattern.expression.pattern for pattern in self._patterns if pattern.of_names)
        self._paths = _join(pattern.expression.pattern for pattern in self._patterns if not pattern.of_names)

    def decide(self, path: str, name: str, *, is_folder: bool) -> bool | None:
        """Return whether ``path``, relative to the folder of the rules, is ignored; None: no pattern matches.

        Only ``path`` itself, which ends with ``name``, is matched, not the folders above it.
        """
        if not (self._names(name) or self._paths(path)):
            return None
        for pattern in reversed(self._patterns):
            if pattern.of_folders and not is_folder:
                continue
            if pattern.expression.fullmatch(name if pattern.of_names else path):
                return pattern.ignores
        return None


class _Pattern(NamedTuple):
    expression: re.Pattern[str]
    of_names: bool
    """Whether it is matched against the name, in any folder."""
    of_folders: bool
    ignores: bool


def _join(patterns: Iterable[str]) -> Callable[[str], object]:
    text = "|".join(f"(?:{pattern})" for pattern in patterns)
    return re.compile(text, re.DOTALL).fullmatch if text else lambda path: None


def _parse(line: str) -> _Pattern | None:
    text = line.rstrip("\r\n")
    while text.endswith(" ") and not text.endswith("\\ "):
        text = text[:-1]
    if not text or text.startswith("#"):
        return None
    ignores = not text.startswith("!")
    text = text if ignores else text[1:]
    of_folders = text.endswith("/")
    text = text[:-1] if of_folders else text
    of_names = "/" not in text
    text = re.sub(r"(?:\*\*/){2,}", "**/", text.removeprefix("/"))
    try:
        return _Pattern(re.compile(_TOKEN.sub(_translate, text), re.DOTALL), of_names, of_folders, ignores)
    except re.error:  # as in git, an invalid pattern matches nothing
        return None


_TOKEN: Final = re.compile(r"^\*\*/|/\*\*/|/\*\*$|\*+|\?|\\.|\[[!^]?\]?(?:\\.|[^\]\\])*\]|.", re.DOTALL)
_WILD: Final = {"**/": "(?:.*/)?", "/**/": "/(?:.*/)?", "/**": "/.+", "?": "[^/]"}


def _translate(token: re.Match[str]) -> str:
    """Return the regular expression of one token of a pattern."""
    text = token[0]
    if text in _WILD:
        return _WILD[text]
    if text.startswith("*"):
        return "[^/]*"
    if text == "[":
        return "(?!)"  # a class without an end matches nothing
    if text.startswith("["):
        negated = text[1] in "!^"
        members = text[2 if negated else 1 : -1].replace("[", r"\[")
        return f"(?!/)[{'^' if negated else ''}{members}]"
    return re.escape(text[1:] if text.startswith("\\") and len(text) > 1 else text)
