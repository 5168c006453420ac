"""Write YAML that all readers read alike: PyYAML (YAML 1.1), kubectl (go-yaml) and readers of YAML 1.2.

They take different bare texts for numbers, booleans or times: ``5e-05`` and ``0o17`` are text for PyYAML and numbers
for kubectl. So a text is written bare only if it begins like a word or a path, or is a quantity.
"""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

import yaml

from ddp_operator.api.texts import INVISIBLE

_WIDTH: Final = 120
_START: Final = r"(?:--?|\.|[_(]*)[A-Za-z]|\.{0,2}/"
_QUANTITY: Final = r"[0-9]+(?:[KMGTP]i|[hms])"
_BARE: Final = re.compile(rf"(?:{_START})[^\n]*|{_QUANTITY}")
_BARE_IN_LIST: Final = re.compile(rf"(?:{_START})(?: ?[A-Za-z0-9_./=-])*|{_QUANTITY}")
_OTHER_TYPES: Final = frozenset(
    (
        *("y", "n", "yes", "no", "on", "off", "true", "false", "null"),
        *("nan", ".nan", "inf", ".inf", "-inf", "infinity", "-infinity"),
    )
)
"""Words, in lower case, that a reader may take for another type than text."""
_INVISIBLE: Final = re.compile(rf"[{INVISIBLE}\ufffe\uffff]")


def format_documents(documents: Iterable[object]) -> str:
    """Return values as the documents of a YAML file, with their keys in order, and without aliases."""
    text = yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=_WIDTH)
    return _escape(str(text))


def format_list(texts: Iterable[str]) -> str:
    """Return texts as a list on one line."""
    return f"[{', '.join(map(format_text, texts))}]"


def format_text(text: str) -> str:
    """Return a text as YAML on one line, also for an item of such a list."""
    if _BARE_IN_LIST.fullmatch(text) and text.lower() not in _OTHER_TYPES:
        return text
    return _escape(json.dumps(text, ensure_ascii=False))  # escaped by JSON, other characters would be two halves


def _escape(text: str) -> str:
    """Return YAML with escapes for the invisible characters, all of which are within double quotes."""
    return _INVISIBLE.sub(lambda match: _format_escape(ord(match[0])), text)


def _format_escape(code: int) -> str:
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _choose_style(text: str) -> str | None:
    """Return how a text is quoted; None: not at all, unless YAML's syntax demands it, which PyYAML decides."""
    if _INVISIBLE.search(text):
        return '"'
    if "\n" in text:
        return "|"
    return None if _BARE.fullmatch(text) and text.lower() not in _OTHER_TYPES else "'"


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """Chooses how texts are quoted, and repeats an object instead of an alias, so that people can read it."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_data(self, data: Any) -> Any:
        """Return the node of a value."""
        is_other_mapping = isinstance(data, Mapping) and not isinstance(data, dict)
        return super().represent_data(dict(data) if is_other_mapping else data)


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=_choose_style(text))


_Dumper.add_representer(str, _represent_text)
_Dumper.add_multi_representer(str, _represent_text)
