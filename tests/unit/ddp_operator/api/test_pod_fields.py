"""Refusals of unknown fields of a pod."""

import json
import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

from ddp_operator.api.pod_fields import FIELDS, POD, explain_unknown_fields, find_unknown_fields

_SCHEMAS = Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema"


def read_definitions() -> dict[str, Any]:
    """Return the definitions of the newest Kubernetes that is installed."""
    newest = max(_SCHEMAS.glob("v*-strict"), key=lambda path: [int(part) for part in re.findall(r"\d+", path.name)])
    definitions: dict[str, Any] = json.loads((newest / "_definitions.json").read_text())["$defs"]
    return definitions


@pytest.mark.parametrize("path", FIELDS)
def test_table_has_fields_of_newest_kubernetes(path: str) -> None:
    definitions = read_definitions()
    schema = next(definitions[name] for name in definitions if name.endswith("core.v1.PodSpec"))
    for step in path.removeprefix(POD).split(".")[1:]:
        schema = schema["properties"][step.removesuffix("[]")]
        schema = schema.get("items", schema)
        reference = schema.get("$ref") or schema["allOf"][0]["$ref"]
        schema = definitions[reference.rpartition("/")[2]]
    assert set(schema["properties"]) == set(FIELDS[path])


def test_misspelt_fields_are_named_with_suggestions() -> None:
    pod = {"containers": [{"name": "trainer", "comand": ["a"], "enviroment": [], "env": [{"nam": "A"}]}], "volume": []}
    assert [str(error) for error in find_unknown_fields(pod)] == [
        'unknown field "spec.template.spec.containers[0].comand"; did you mean command?',
        'unknown field "spec.template.spec.containers[0].enviroment"; did you mean env?',
        'unknown field "spec.template.spec.containers[0].env[0].nam"; did you mean name?',
        'unknown field "spec.template.spec.volume"; did you mean volumes?',
    ]


def test_number_of_reported_fields_is_bounded() -> None:
    many = {f"x{number}": 1 for number in range(1000)}
    assert len(find_unknown_fields(many)) == 10
    message = " ".join(f'unknown field "spec.template.spec.x{number}"' for number in range(1000))
    assert len(explain_unknown_fields(message).splitlines()) == 10
