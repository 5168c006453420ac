"""Read the objects of a YAML file as kubectl does, and refuse equal keys, of which kubectl takes the last silently.

kubectl reads YAML 1.1 with differences: no sexagesimal numbers (``12:30``), ``=`` is text, a merge (``<<``) replaces
earlier keys, and keys become strings (keys that are floats are refused). A test compares this module with kubectl.
libyaml, of which kubectl has a translation, parses the syntax; PyYAML's own parser replaces it where it is missing.
"""

import base64
import math
import re
from collections.abc import Iterator
from typing import Any, Final

import yaml
from yaml.composer import Composer
from yaml.parser import Parser
from yaml.reader import Reader
from yaml.resolver import BaseResolver
from yaml.scanner import Scanner

from ddp_operator.api.errors import FieldError, InvalidManifest

_MAX_TEXT: Final = 16 << 20  # characters of a file; the API server takes 3 MiB of one object
_MAX_NODES: Final = 200_000
_MAX_CHARACTERS: Final = 32 << 20
_MAX_DEPTH: Final = 100
_TAG: Final = "tag:yaml.org,2002:"
_PLAIN: Final = "?"
"""Our tag of a scalar whose type its text decides."""
_CONSTANTS: Final[dict[str, Any]] = {
    **dict.fromkeys(("y", "Y", "yes", "Yes", "YES", "true", "True", "TRUE", "on", "On", "ON"), True),
    **dict.fromkeys(("n", "N", "no", "No", "NO", "false", "False", "FALSE", "off", "Off", "OFF"), False),
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys((".nan", ".NaN", ".NAN"), math.nan),
    **{sign + text: math.inf for sign in ("", "+") for text in (".inf", ".Inf", ".INF")},
    **dict.fromkeys(("-.inf", "-.Inf", "-.INF"), -math.inf),
}
_NUMBER: Final = re.compile(r"[-+]?(?:0[xX][0-9a-fA-F]+|0[bB][01]+|0[oO]?[0-7]+|0|[1-9][0-9]*)")
_FLOAT: Final = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_MISPLACED: Final = re.compile(r"(?<![0-9])_|_(?![0-9])")
_SEPARATOR: Final = re.compile(r"^---(?![ \t\r]*(?:#.*)?$).*", re.MULTILINE)
_MAX_DIGITS: Final = 400  # of a number; longer ones are no 64-bit number in any notation


def load_documents(text: str) -> list[dict[str, Any]]:
    """Return the objects of a YAML file, and those of its lists. Raises: InvalidManifest."""
    if len(text) > _MAX_TEXT:
        message = f"has more than {_MAX_TEXT >> 20} MiB; pass the path of a manifest, and store data elsewhere"
        raise InvalidManifest([FieldError("the file", message)])
    separator = _SEPARATOR.search(text)
    if separator:
        line = f"line {text.count(chr(10), 0, separator.start()) + 1}"
        raise InvalidManifest([FieldError(line, "not valid YAML: text after ---; write it on the next line")])
    try:
        loader = _Loader(text)
        documents = [document for document in _read_documents(loader) if document is not None]
    except InvalidManifest:
        raise
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}, column {mark.column + 1}" if mark else "the file"
        problem = getattr(error, "problem", None) or "cannot be parsed"
        if "cannot start any token" in problem:
            problem += " (a tab in the indentation, or text that begins with @, % or ` without quotes)"
        raise InvalidManifest([FieldError(where, f"not valid YAML: {problem}; fix the file there")]) from None
    except (ValueError, RecursionError, UnicodeError) as error:
        raise InvalidManifest([FieldError("the file", f"not valid YAML: {error}")]) from None

    objects: list[Any] = []
    for document in documents:
        is_list = isinstance(document, dict) and isinstance(document.get("items"), list)
        objects += document["items"] if is_list and str(document.get("kind")).endswith("List") else [document]
    if not all(isinstance(document, dict) for document in objects):
        message = "contains a document that is not a Kubernetes object; remove it, or pass the path of a job's YAML"
        raise InvalidManifest([FieldError("the file", message)])
    return objects


def _refuse_expansion() -> InvalidManifest:
    message = (
        f"not valid YAML: expands to more than {_MAX_NODES} values, {_MAX_CHARACTERS >> 20} MiB or {_MAX_DEPTH} "
        "levels; use fewer aliases (*name), or split the file"
    )
    return InvalidManifest([FieldError("the file", message)])


class _PythonEvents(Reader, Scanner, Parser):
    """PyYAML's parser."""

    def __init__(self, stream: str) -> None:
        Reader.__init__(self, stream)
        Scanner.__init__(self)
        Parser.__init__(self)


_Events: Any = getattr(yaml.cyaml, "CParser", _PythonEvents) if yaml.__with_libyaml__ else _PythonEvents


class _Loader(Composer, _Events, BaseResolver):  # type: ignore[misc]
    """Reads documents as trees of nodes.

    It bounds the expanded size of the file: a node counts each time that an alias or a merge refers to it.
    """

    def __init__(self, stream: str) -> None:
        _Events.__init__(self, stream)
        Composer.__init__(self)
        BaseResolver.__init__(self)
        self._depth = 0
        self._nodes = 0
        self._expanded: dict[int, tuple[int, int]] = {}  # nodes and characters by the identity of a node
        self._nodes_left = _MAX_NODES
        self._characters_left = _MAX_CHARACTERS

    def resolve(self, kind: type[yaml.Node], value: Any, implicit: Any) -> str:
        """Return the tag of a node without one."""
        if kind is yaml.ScalarNode:
            return _PLAIN if implicit[0] else f"{_TAG}str"
        return f"{_TAG}map"

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Read a node, which may be an alias. Raises: InvalidManifest."""
        self._depth += 1
        self._nodes += 1
        if self._depth > _MAX_DEPTH or self._nodes > _MAX_NODES:
            raise _refuse_expansion()
        event = self.peek_event()
        if not isinstance(event, yaml.AliasEvent):
            self.anchors.pop(event.anchor, None)  # a later anchor replaces one with the same name
            if event.tag == "!" and isinstance(event, yaml.ScalarEvent):
                event.tag = f"{_TAG}str"
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def compose_document(self) -> Any:
        """Read a document and count its expanded size. Raises: InvalidManifest."""
        self._expanded = {}
        document = super().compose_document()
        nodes, characters = self._measure(document)
        self._nodes_left -= nodes
        self._characters_left -= characters
        if self._nodes_left < 0 or self._characters_left < 0:
            raise _refuse_expansion()
        return document

    def _measure(self, node: Any) -> tuple[int, int]:
        """Return the expanded size of a node, in nodes and characters. Its depth is bounded already."""
        known = self._expanded.get(id(node))
        if known is not None:
            return known
        if isinstance(node, yaml.ScalarNode):
            return 1, len(node.value)
        self._expanded[id(node)] = (_MAX_NODES + 1, 0)  # an alias to a node around it never ends
        nodes = 1
        characters = 0
        for item in node.value:
            for member in item if isinstance(item, tuple) else (item,):
                more = self._measure(member)
                nodes += more[0]
                characters += more[1]
        self._expanded[id(node)] = nodes, characters
        return nodes, characters


def _read_documents(loader: _Loader) -> Iterator[Any]:
    while loader.check_node():
        yield _build(loader.get_node())


def _build(node: Any) -> Any:
    """Return the value of a node. Raises: InvalidManifest."""
    if isinstance(node, yaml.SequenceNode):
        return [_build(item) for item in node.value]
    if isinstance(node, yaml.MappingNode):
        return _build_mapping(node)
    value = _build_scalar(node)
    if isinstance(value, float) and not math.isfinite(value):
        raise _refuse(node, f"{node.value} is no number in JSON; quote it")
    return value


def _build_mapping(node: yaml.MappingNode) -> dict[str, Any]:
    """Return an object. A merge replaces the keys before it, and the keys after it replace those of the merge."""
    mapping: dict[str, Any] = {}
    written: set[str] = set()
    for key_node, value_node in node.value:
        if key_node.value == "<<" and key_node.tag in (_PLAIN, f"{_TAG}merge"):
            mapping |= _build_merge(value_node)
            continue
        key = _build_key(key_node)
        if key in written:
            raise _refuse(key_node, f'key "{key}" is duplicated; remove one')
        written.add(key)
        mapping[key] = _build(value_node)
    return mapping


def _build_merge(node: yaml.Node) -> dict[str, Any]:
    """Return the members of a merge; those of the first object in a list take precedence."""
    merged: dict[str, Any] = {}
    for item in reversed(node.value) if isinstance(node, yaml.SequenceNode) else [node]:
        if not isinstance(item, yaml.MappingNode):
            raise _refuse(item, "<< must name an object or a list of objects; correct it, or quote the key")
        merged |= _build_mapping(item)
    return merged


def _build_key(node: yaml.Node) -> str:
    """Return a key as text: kubectl writes other types as JSON does, except floats, of which it drops digits."""
    key = _build_scalar(node) if isinstance(node, yaml.ScalarNode) else None
    if isinstance(key, str):
        return key
    if isinstance(key, bool):
        return str(key).lower()
    if isinstance(key, int):
        return str(key)
    raise _refuse(node, "the key is not a string; quote it")


def _build_scalar(node: yaml.ScalarNode) -> Any:
    """Return the value of a scalar by its tag, or by its text. Raises: InvalidManifest."""
    tag = node.tag.removeprefix(_TAG)
    if tag == "binary":
        try:
            return base64.b64decode(node.value, validate=True).decode(errors="replace")
        except ValueError:
            raise _refuse(node, "!!binary is not valid base64; correct it") from None
    types = {"int": int, "float": int | float, "bool": bool, "null": type(None)}
    if tag != _PLAIN and tag not in types:
        return node.value
    value = _resolve(node.value)
    if tag in types and (not isinstance(value, types[tag]) or isinstance(value, bool) != (tag == "bool")):
        raise _refuse(node, f"the value is no !!{tag}; correct it or remove the tag")
    return value


def _resolve(text: str) -> Any:
    """Return the value of unquoted text."""
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    is_fraction = text[0] == "."
    if text[0] not in "+-.0123456789":
        return text
    plain = text if is_fraction and _MISPLACED.search(text) else text.replace("_", "")
    if len(plain) > _MAX_DIGITS:
        return text
    if not is_fraction and _NUMBER.fullmatch(plain):
        number = _parse_integer(plain)
        if -(2**63) <= number < 2**64:
            return number if number < 2**63 else float(number)
    if _FLOAT.fullmatch(plain):
        value = float(plain)
        if math.isfinite(value):
            # JSON has one type for numbers, so kubectl reads 1e3 as an integer.
            return int(value) if value.is_integer() and abs(value) < 2**63 else value
    return text


def _parse_integer(text: str) -> int:
    """Return an integer in one of the notations of Go; 017 is octal."""
    digits = text.lstrip("+-")
    is_octal = re.fullmatch(r"0[0-7]+", digits) is not None
    number = int(digits, 8) if is_octal else int(digits, 0)
    return -number if text.startswith("-") else number


def _refuse(node: yaml.Node, problem: str) -> InvalidManifest:
    return InvalidManifest([FieldError(f"line {node.start_mark.line + 1}", problem)])
