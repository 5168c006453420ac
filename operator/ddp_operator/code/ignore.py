"""Patterns of .gitignore, matched as git does: each against one path, of which a walk has let in all parents."""

import re
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple


class Rules:
    """The patterns of a .gitignore, or of several, the later ones stronger."""

    def __init__(self, lines: Iterable[str]) -> None:
        self._patterns = [pattern for line in lines if (pattern := _parse(line)) is not None]
        # Most paths match nothing, and one expression is quicker than twenty.
        self._names = _join(one.expression.pattern for one in self._patterns if one.of_names)
        self._paths = _join(one.expression.pattern for one in self._patterns if not one.of_names)

    def decide(self, path: str, name: str, *, is_folder: bool) -> bool | None:
        """Return whether ``path``, relative to where the rules are, is ignored; None: they do not say.

        ``path``, which ends with ``name``, itself is meant: nothing is said of one because of a folder that it is in.
        """
        if not (self._names(name) or self._paths(path)):
            return None
        for one in reversed(self._patterns):
            if (is_folder or not one.of_folders) and one.expression.fullmatch(name if one.of_names else path):
                return one.ignores
        return None


class _Pattern(NamedTuple):
    expression: re.Pattern[str]
    of_names: bool
    """Whether it is matched against a name, in whatever folder."""
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
    except re.error:  # as in git, what is no pattern matches nothing
        return None


_TOKEN: Final = re.compile(r"^\*\*/|/\*\*/|/\*\*$|\*+|\?|\\.|\[[!^]?\]?(?:\\.|[^\]\\])*\]|.", re.DOTALL)
_WILD: Final = {"**/": "(?:.*/)?", "/**/": "/(?:.*/)?", "/**": "/.+", "?": "[^/]"}


def _translate(token: re.Match[str]) -> str:
    word = token[0]
    if word in _WILD:
        return _WILD[word]
    if word.startswith("*"):
        return "[^/]*"
    if word == "[":
        return "(?!)"  # a class without an end matches nothing
    if word.startswith("["):
        negated = word[1] in "!^"
        return f"(?!/)[{'^' if negated else ''}{word[2 if negated else 1 : -1].replace('[', chr(92) + '[')}]"
    return re.escape(word[1:] if word.startswith("\\") and len(word) > 1 else word)
