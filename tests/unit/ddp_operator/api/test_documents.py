"""YAML is read as kubectl reads it."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import subprocess
from typing import Any

import pytest
import yaml

from ddp_operator.api import documents
from ddp_operator.api.documents import load_documents
from ddp_operator.api.errors import InvalidManifest

SCALARS = """
yes Yes YES no No NO on On ON off OFF y Y n N true True TRUE false tRue nO null Null NULL ~ nULL none
1 -1 +1 0 -0 00 01 07 08 09 010 017 0o17 0O17 -0o17 0x1F 0X1f -0x1f +0x1f 0x 0b101 -0b101 0B1 0b 0b2 0b_1 1_000 1__0 _1
1_ 0x_1f 0o1_7 012_3 1_0.5 +_1 0_8 9223372036854775807 -9223372036854775808 0777777777777777777777
02000000000000000000000
1.5 -1.5 +1.5 .5 5. -.5 +.5 -5. 1e3 1E3 1e+3 1e-3 1.5e3 .5e3 5.e3 1e 1e+ .e3 .5_0 ._5 .inf -.inf +.INF .iNF inf .nan nan
1.2.3 1_0e3 0.0 1e400 12:30 1:2:3 190:20:30 12:30:45.6 1:60 -1:30 24:00 = << ? ! - -- --- ... .. . + :: a:b 2024-01-01
2024-1-1 2024-01-01T00:00:00Z 2024-13-45 20240101 1e20 1e21 123456789.123456789 3.10 685_230.15 0x1.8p3 infinity NaN
'yes' "1" '01' "\\x41\\u00e9\\e" '' @a `a %a &a !!str !!str|1 !!int|'3' !!int|x !!float|3 !!bool|'yes' !!binary|aGk= !|1
!foo|1 !foo|[1] !!set|{a,|b} !!omap|[a:|1] !!timestamp|2024-01-01
""".replace("\n", " ").split()
FORMS = (
    "v: {a: 1, <<: {a: 2, b: 3}}", "v: {<<: {a: 2, b: 3}, a: 1}", "v: {<<: [{a: 1}, {a: 2, b: 2}], c: 3}",
    "x: &x {a: 1, b: 2}\nz: &z {b: 3, c: 4}\nv: {c: 5, <<: [*x, *z], b: 6}\nw: {<<: *x}",
    "x: &x {a: 1}\nz: &z {<<: *x, b: 2}\nv: {<<: *z}", "v: {<<: 1}", "v: {<<: [1]}", "v: {<<: [[{a: 1}]]}", "v: {<<: }",
    "v: {'<<': {a: 1}}", "v: {<<: {a: 1}, <<: {b: 2}}", "v: {!!merge <<: {a: 1}}", "v: {<<: []}",
    "v: {null: 1}", "v: {[a]: 1}", "v: {2024-01-01: 1}",
    "v: {8080: a, 017: b, true: c, n: d}", "a: &x 1\nb: &x 2\nv: *x", "a: &x {b: *x}", "v: *nope", "&k key: 1\nv: *k",
    "v: |\n  a\n  b", "v: >-\n  a\n  b\n\n  c", "v: |+\n  a\n\n\nw: 1", "v: 'it''s'", "v:\t1", "v: a\tb", "\tv: 1",
    "v: [a, b,]", "v: {a, b: }", "v: {a:1}", 'v: {"a":1}', "? a\n: b", "v: a: b", "v: a #c", "v: a#c", "v: {a: http://x}",
    "v: -", "v:\n- a\n- b", "v: a\n  b", "v: é", "v: \U0001f600", "v: a\u00a0b", "v: a\r\nw: b\r", "---x",
    "--- {kind: B}",
)  # fmt: skip


# A key that is a float, which this module refuses.
FLOAT = re.compile(
    r"[-+]?(\.[0-9_]*|[0-9][0-9_]*\.[0-9]*|[0-9][0-9_.]*[eE][-+]?[0-9]+|[0-9]{19,}|\.(inf|INF|nan))|!!float.*"
)
HEAD = "kind: ConfigMap\napiVersion: v1\nmetadata: {name: a}\n"
# libyaml refuses this colon.
DIFFERENT = (f"{HEAD}v: [a:]\n",)


def list_texts() -> list[str]:
    forms = [form.replace("|", " ") for text in SCALARS for form in (f"v: {text}", f"v: [{text}]")]
    forms += [f"{text.replace('|', ' ')}: 1" for text in SCALARS if not FLOAT.fullmatch(text)]
    return [f"{HEAD}{text}\n" for text in [*forms, *FORMS]]


def read(text: str) -> Any:
    """Return the object of a text; None if it is refused."""
    try:
        [document] = load_documents(text)
    except InvalidManifest:
        return None
    return document


def read_by_kubectl(text: str) -> list[Any]:
    """Return the objects of a text; none if it is refused."""
    command = ["kubectl", "annotate", "--local", "-f", "-", "a=b", "-o", "json"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    results = []
    decoder = json.JSONDecoder()
    rest = done.stdout if done.returncode == 0 else ""
    while rest:
        result, end = decoder.raw_decode(rest)
        rest = rest[end:].lstrip()
        del result["metadata"]["annotations"]
        results.append(result)
    return results


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{a: {b: 1}, <<: {c: 2}}", {"a": {"b": 1}, "c": 2}),
        ("[12:30, =, 0o17, 017, 08, 1e3, -.5, 1_000, 2024-01-01]",
         ["12:30", "=", 15, 15, 8, 1000, -0.5, 1000, "2024-01-01"]),
        ("[yes, n, ~, 'yes', !!str yes, ! 1, !!binary aGk=]", [True, False, None, "yes", "yes", "1", "hi"]),
        ("{8080: a, yes: b}", {"8080": "a", "true": "b"}),
        ("[9223372036854775807, 9223372036854775808, 0x1FFFFFFFFFFFFFFFF]",
         [2**63 - 1, float(2**63), "0x1FFFFFFFFFFFFFFFF"]),
        (f"[{'1' * 5000}, {'1' * 5000}.0]", ["1" * 5000, "1" * 5000 + ".0"]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("has_libyaml", [True, False])
def test_values_are_those_of_kubectl(
    monkeypatch: pytest.MonkeyPatch, has_libyaml: bool, text: str, expected: Any
) -> None:
    monkeypatch.setattr(yaml, "__with_libyaml__", has_libyaml)
    assert documents.__spec__ is not None
    module = importlib.util.module_from_spec(documents.__spec__)
    documents.__spec__.loader.exec_module(module)  # type: ignore[union-attr]
    [document] = module.load_documents(f"v: {text}\n")
    assert document["v"] == expected
    assert [type(item) for item in document["v"]] == [type(item) for item in expected]


def test_lists_become_their_items() -> None:
    text = "kind: List\nitems: [{kind: A}, {kind: B}]\n---\nkind: PodList\nitems: []\n---\nkind: C\nitems: [1]\n"
    assert [item["kind"] for item in load_documents(text)] == ["A", "B", "C"]


@pytest.mark.apiserver
def test_forms_are_read_as_by_kubectl() -> None:
    """Both refuse a text or read the same; only kubectl accepts equal keys."""
    texts = [text for text in list_texts() if text not in DIFFERENT]
    accepted = [text for text in texts if read(text) is not None]
    assert len(accepted) > 400
    theirs = read_by_kubectl("---\n".join(accepted))
    assert len(theirs) == len(accepted)
    assert [(text, it) for text, it in zip(accepted, theirs, strict=True) if not _is_equal(read(text), it)] == []
    refused = [text for text in texts if read(text) is None]
    assert len(refused) > 20
    assert [text for text in refused if read_by_kubectl(text)] == []


def _is_equal(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, float) and isinstance(theirs, int | float):
        return math.isclose(ours, theirs, rel_tol=1e-15)
    if isinstance(ours, list) and isinstance(theirs, list):
        return len(ours) == len(theirs) and all(map(_is_equal, ours, theirs))
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(_is_equal(ours[key], theirs[key]) for key in ours)
    return bool(ours == theirs) and type(ours) is type(theirs)
