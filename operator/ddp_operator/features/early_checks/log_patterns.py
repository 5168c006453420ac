"""Check ``metrics.logPatterns`` before a pod compiles them. Pure."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, Final

from ddp_operator.api.errors import FieldError
from ddp_operator.manifests.torchrun import InvalidCommand, split_user_command
from ddp_pod.contract.log_patterns import compile_log_pattern

_MAX_PATTERNS: Final = 1024
"""Maximum characters of a job's log patterns that are compiled here."""
_MAX_CLASSES: Final = 16
"""Maximum character classes in these patterns; each may list 256 characters."""
_BEYOND_LATIN: Final = re.compile(r"\\[uUN]")


def check_log_patterns(patterns: Sequence[str], trainer: Mapping[str, Any]) -> Iterator[FieldError]:
    """Refuse invalid patterns, and options of torchrun that redirect the output. ``trainer``: the container."""
    for index, problem in find_invalid_patterns(patterns):
        yield FieldError(f"spec.metrics.logPatterns[{index}]", problem, patterns[index])
    if not patterns:
        return
    with suppress(InvalidCommand):  # the kernel refuses it
        command = split_user_command(trainer.get("command") or [], trainer.get("args") or [])
        for name in command.options.list_output_flags():
            flag = f"--{name.replace('_', '-')}"
            message = f"has no effect, because torchrun's {flag} redirects the output; remove one of the two"
            yield FieldError("spec.metrics.logPatterns", message)


def find_invalid_patterns(patterns: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Yield the index of each invalid pattern, with the reason and the remedy.

    A pattern of 512 characters can take half a second to compile, because a character class beyond Latin-1 is expanded.
    Only cheap patterns are compiled here; the pod compiles all of them.
    """
    length = 0
    classes = 0
    for index, text in enumerate(patterns):
        length += len(text)
        classes += text.count("[")
        is_small = length <= _MAX_PATTERNS and classes <= _MAX_CLASSES
        problem = _compile_pattern(text) if is_small and text.isascii() and not _BEYOND_LATIN.search(text) else ""
        if problem:
            yield index, problem


@lru_cache(maxsize=256)
def _compile_pattern(text: str) -> str:
    """Return why a pattern is invalid, empty if it is valid. The result is cached."""
    try:
        compile_log_pattern(text)
    except ValueError as error:
        return str(error)
    return ""
