"""Texts that readers of YAML take for other types, and two readers besides ours: YAML 1.2's rules, and kubectl."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any, Final

import yaml

WORDS: Final = """
5e-05 1e-05 1e-06 1e-4 12e7 3e8 1e10 1E3 1e+3 .5e3 5.e3 0e1 1e400 1_000 1__0 _1 1_ 0999 017 00 -0 +1 -1 0 42
9007199254740993 0x1f 0X1F -0x1f 0x 0o17 0O17 0b1 0b101 .5 5. -.5 1.5 1.2.3 0.2.0 -.inf +.INF .inf .Inf .nan .NaN inf
Infinity -inf NaN nan 12:30 1:30:45 190:20:30 12:30:45.6 2026-11-28 2026-1-1 2026-11-28T10:00:00Z 20261128
2026-11-28t10:00:00.5+01:00 = << ~ null Null NULL nULL none y Y yes Yes YES n N no No NO on On ON off Off OFF true True
TRUE tRue false False FALSE - -- --- ? : , [ ] { } {a} [a] & * ! | > % @ ` # &a *a !!str !a .. ... + a: :a a:b --lr -lr
-y --yes ./train.py ../x / /data .venv .dockerconfigjson nvidia.com/gpu __name__ (a) 512Mi 100m 30s 7E 1e3Mi 0x1s
""".replace("\n", " ").split()
PHRASES: Final = (
    *("", " ", "  ", " a", "a ", "\ta", "a\t", "a\tb", "- x", "? x", ": x", "# x", "a #b", "a: b", "a,b", "it's"),
    *('say "x"', "\\", "\\n", "a\\\u200bb", "\n", "\n\n", "a\n", "a\n\n", "a\nb", "a\nb\n", "a\n b\n", " a\nb"),
    *("\na", "a \nb", "a\n\tb", "a\n\n\nb", "a\n  \nb", "---\na", "a\n---\nb", "...\n", "%x\n%y", "# a\nb"),
    *("- a\n- b", "key: |\n  x", "5e-05\n", "null\n", "\r", "a\r\nb", "a\x85b", "a\u2028b", "a\u2029b", "\ufeffa"),
    *("a\ufeff", "\x00", "a\x07", "\x7f", "\x1b[31m", "é", "日本", "😀", "a😀\nb", "a\xa0b", "\u3000a", "\u200b"),
    *("a\u202eb", "\ufffe", "x" * 300, "word " * 60, "word  two " * 60, "a - b ? c " * 40, "x: " * 60, "' " * 90),
    *('" ' * 90, "é " * 100, "\u200b " * 80, "a" * 130 + ": ", "😀 " * 90),
)
TEXTS: Final = (*WORDS, *PHRASES)

_RESOLVED: Final = (
    r"|~|null|Null|NULL|<<|=",
    r"y|Y|yes|Yes|YES|n|N|no|No|NO|on|On|ON|off|Off|OFF|true|True|TRUE|false|False|FALSE",
    r"[-+]?0[bB][01_]+|[-+]?0[oO]?[0-7_]+|[-+]?0[xX][0-9a-fA-F_]+|[-+]?[0-9][0-9_]*",
    r"[-+]?(?:\.[0-9][0-9_]*|[0-9][0-9_]*(?:\.[0-9_]*)?)(?:[eE][-+]?[0-9]+)?",
    r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
    r"[-+]?[0-9][0-9_]*(?::[0-5]?[0-9])+(?:\.[0-9_]*)?",
    r"[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}(?:(?:[Tt]|[ \t]+)[0-9]{1,2}:[0-9]{2}:[0-9]{2}.*)?",
)
"""What YAML 1.1, the core schema of YAML 1.2 or go-yaml resolves to another type than text."""


def list_misread(text: str) -> list[str]:
    """Return the bare scalars of a YAML text that are written for texts, and that a reader takes for another type."""
    return [scalar for scalar in _list_bare(text) if any(re.fullmatch(form, scalar) for form in _RESOLVED)]


def _list_bare(text: str) -> Iterator[str]:
    for event in yaml.parse(text):
        if isinstance(event, yaml.ScalarEvent) and event.style is None:
            yield event.value


def find_kubectl() -> str | None:
    """Return the path of kubectl, beside the control plane of the tests or in PATH."""
    places = (os.environ.get("KUBEBUILDER_ASSETS", ""), os.environ.get("PATH", ""))
    return shutil.which("kubectl", path=os.pathsep.join(filter(None, places)))


def read_by_kubectl(kubectl: str, text: str) -> Any:
    """Return an object as kubectl reads it, without a server."""
    command = [kubectl, "annotate", "--local", "-f", "-", "a=b", "-o", "json"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=True)
    content = json.loads(done.stdout)
    del content["metadata"]["annotations"]
    return content
