"""Checks of metrics.logPatterns with a bounded cost.

A pattern of 512 characters can take half a second to compile, because a character class beyond Latin-1 is expanded. The
pod compiles all patterns. The operator compiles only patterns of low cost; of the others it checks the group names.
"""

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Final

from ddp_operator.launcher.progress.log_patterns import LOG_GROUPS, compile_log_pattern

MAX_LENGTH: Final = 1024
"""Maximum characters of a job's patterns that are compiled here."""
MAX_CLASSES: Final = 16
"""Maximum character classes in these patterns; each may list 256 characters."""
_BEYOND_LATIN: Final = re.compile(r"\\[uUN]")
# Matches an escape, a character class (to skip them), or the start of a named group.
_GROUP: Final = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*(?:\]|\Z|\\\Z)|\(\?P<([^>)]*)>", re.DOTALL)


def check_log_patterns(patterns: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Yield the index of each invalid pattern, with the reason and the remedy."""
    length = 0
    classes = 0
    for index, text in enumerate(patterns):
        length += len(text)
        classes += text.count("[")
        cheap = text.isascii() and not _BEYOND_LATIN.search(text) and length <= MAX_LENGTH and classes <= MAX_CLASSES
        problem = _compile(text) if cheap else _check_groups(text)
        if problem:
            yield index, problem


@lru_cache(maxsize=256)
def _compile(text: str) -> str:
    """Return why a pattern is invalid, empty if it is valid. The result is cached."""
    try:
        compile_log_pattern(text)
    except ValueError as error:
        return str(error)
    return ""


def _check_groups(text: str) -> str:
    groups = {match[1] for match in _GROUP.finditer(text) if match[1] is not None}
    known = ", ".join(LOG_GROUPS)
    unknown = sorted(groups - set(LOG_GROUPS))
    if unknown:
        return f"names the unknown group {unknown[0]}; known are {known}"
    if not groups:
        return f"names no group, so nothing would be read; write for example (?P<step>\\d+), known: {known}"
    return ""
