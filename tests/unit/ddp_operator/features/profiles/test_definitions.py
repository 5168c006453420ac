"""The definitions of both kinds of profile."""

import jsonschema

from ddp_operator.features import SCHEMA
from ddp_operator.features.profiles.definitions import NOT_OF_PROFILES, build_definitions


def test_profile_schema_equals_job_schema_without_required() -> None:
    definitions = build_definitions(SCHEMA)
    assert [item["spec"]["scope"] for item in definitions.values()] == ["Cluster", "Namespaced"]
    schemas = [item["spec"]["versions"][0]["schema"]["openAPIV3Schema"] for item in definitions.values()]
    schema = schemas[0]
    assert schemas == [schema, schema]
    jsonschema.Draft202012Validator.check_schema(schema)
    job = schema["properties"]["spec"]["properties"]["job"]
    assert not set(NOT_OF_PROFILES) & set(job["properties"])
    assert "required" not in job
    assert "required" not in job["properties"]["checkpoint"]
    assert job["properties"]["recovery"]["properties"]["maxRestarts"]["x-kubernetes-validations"]
    assert "default" not in str(job["properties"]["recovery"])
