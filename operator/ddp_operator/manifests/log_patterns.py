"""Checks of metrics.logPatterns with a bounded cost.

A pattern of 512 characters can take half a second to compile, because a character class beyond Latin-1 is expanded. The
pod compiles all patterns. The operator compiles only cheap patterns, and checks only the group names of expensive ones.
"""

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Final

from ddp_pod.contract.log_patterns import check_groups, compile_log_pattern

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
        problem = _compile(text) if cheap else _find_group_problem(text)
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


def _find_group_problem(text: str) -> str:
    """Return why the named groups of a pattern are invalid, without compiling it; empty if they are valid."""
    groups = {match[1] for match in _GROUP.finditer(text) if match[1] is not None}
    try:
        check_groups(groups)
    except ValueError as error:
        return str(error)
    return ""
