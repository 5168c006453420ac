"""The resolver of the C library, by which this pod's processes find the addresses of others."""

from collections.abc import MutableMapping
from contextlib import suppress
from typing import Final

_VARIABLE: Final = "RES_OPTIONS"  # resolv.conf(5); glibc reads it when a process resolves its first name
_FILE: Final = "/etc/resolv.conf"
_LIMIT: Final = 1 << 16
_OPTIONS: Final = "timeout:1 attempts:4"


def repeat_lost_queries_soon(environment: MutableMapping[str, str], path: str = _FILE) -> None:
    """Let this process and its children repeat a query to the DNS after 1, 2 and 4 s, unless the pod's options say how.

    By default the C library waits 5 s for an answer, and in a cluster a packet is lost now and then: a restart, which
    resolves the name of pod 0, would take as long.
    """
    text = ""
    with suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
        text = file.read(_LIMIT)
    if "timeout:" not in text:
        environment.setdefault(_VARIABLE, _OPTIONS)
