"""Checks of metrics.logPatterns that the operator can afford for any job.

A pattern of 512 characters can take half a second to compile: a character class beyond Latin-1 is expanded. The pod
compiles all patterns. The operator compiles those of a job that are cheap, together, and reads the names of the groups
of the others.
"""

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Final

from ddp_operator.launcher.log_patterns import LOG_GROUPS, compile_log_pattern

MAX_LENGTH: Final = 1024
"""Characters of the patterns of one job that are compiled here."""
MAX_CLASSES: Final = 16
"""Their character classes: each may list 256 characters."""
_BEYOND_LATIN: Final = re.compile(r"\\[uUN]")
# Of what begins a group, an escape and a character class are skipped as a whole.
_GROUP: Final = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*(?:\]|\Z|\\\Z)|\(\?P<([^>)]*)>", re.DOTALL)


def check_log_patterns(patterns: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Yield the index of each pattern that is wrong, with the reason and the remedy."""
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
    """Return why a pattern is wrong, empty where it is not; one text is compiled once."""
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
