"""Match patterns of .gitignore as git does: against one path, after a walk has accepted all its parents."""

import re
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple


class Rules:
    """The patterns of one or more .gitignore files; later patterns take precedence. Raises: ValueError."""

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
            if pattern.expression.match(name if pattern.of_names else path):
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
    return re.compile(text, re.DOTALL).match if text else lambda path: None


def _parse(line: str) -> _Pattern | None:
    text = line.removesuffix("\r")
    while text.endswith(" ") and not text.endswith("\\ "):
        text = text[:-1]
    if not text or text.startswith("#"):
        return None
    if len(text) > _MOST_CHARACTERS:
        raise ValueError(f"the pattern {text[:40]}… has more than {_MOST_CHARACTERS} characters; shorten it")
    ignores = not text.startswith("!")
    text = text if ignores else text[1:]
    of_folders = text.endswith("/")
    text = text[:-1] if of_folders else text
    expression = re.compile(_translate(text.removeprefix("/")), re.DOTALL)
    return _Pattern(expression, "/" not in text, of_folders, ignores)


_MOST_CHARACTERS: Final = 1000
_CLASS: Final = r"\[[!^]?(?:\]|)(?:\[:\w*:\]|\\.|[^]\\])*+\]"
_TOKEN: Final = re.compile(rf"\*+|{_CLASS}|\\.|.", re.DOTALL)
_MEMBER: Final = re.compile(r"\[:(\w*):\]|\\?(.)(?:-\\?(.))?", re.DOTALL)
_NOTHING: Final = "(?!)"
_POSIX: Final = {"alnum": "0-9A-Za-z", "alpha": "A-Za-z", "digit": "0-9", "lower": "a-z", "upper": "A-Z"}


def _translate(pattern: str) -> str:
    """Return the regular expression of a pattern.

    An atomic group ends before the next wildcard of its kind: the first match leaves most to the rest, so nothing is
    tried twice, and the time is linear in the lengths of pattern and path.
    """
    *folders, name = pattern.split("/")
    expression = ""
    close = ""
    for folder in folders:
        if folder == "**":
            expression += f"{close}(?>(?:[^/]+/)*?"
            close = ")"
        else:
            expression += _translate_name(folder, "/")
    return expression + ("[^/].*" if name == "**" else _translate_name(name, r"\Z")) + close


def _translate_name(name: str, end: str) -> str:
    """Return the regular expression of a part between slashes, and of ``end`` after it."""
    pieces = [""]
    for token in _TOKEN.findall(name):
        if token.startswith("*"):
            pieces.append("")
        else:
            pieces[-1] += _translate_part(token)
    pieces[-1] += end
    return pieces[0] + "".join(f"(?>[^/]*?{piece})" for piece in pieces[1:])


def _translate_part(part: str) -> str:
    if part == "?":
        return "[^/]"
    if part in ("[", "\\"):
        return _NOTHING  # as in git, a class without an end matches nothing
    if not part.startswith("["):
        return re.escape(part[-1])
    negated = part[1] in "!^"
    members = "".join(_translate_member(member) for member in _MEMBER.finditer(part[2 if negated else 1 : -1]))
    if negated:
        return f"[^/{members}]"
    return f"(?!/)[{members}]" if members else _NOTHING


def _translate_member(member: re.Match[str]) -> str:
    name, first, last = member.groups()
    if name is not None:
        return _POSIX.get(name, "")
    if last is None:
        return re.escape(first)
    return f"{re.escape(first)}-{re.escape(last)}" if first <= last else ""
