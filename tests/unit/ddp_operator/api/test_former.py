"""Fields of the release before are taken over, and named with what replaces them."""

from __future__ import annotations

from ddp_operator.api.crd import build_spec_schema
from ddp_operator.api.former import FormerField, find_former, list_changed, take_over_former
from ddp_operator.api.parse import parse_resource
from ddp_operator.api.schema import KERNEL
from ddp_operator.api.written import parse_written
from tests.support.builders import resource

MOVED = FormerField("a.b", "write a.c", {"type": "string"}, lambda value, _: {"a": {"c": value}})
OF_ITEMS = FormerField("list[].b", "write c", {"type": "string"}, lambda value, item: {"c": f"{value} {item['d']}"})


def test_value_moves_and_its_neighbours_stay() -> None:
    assert take_over_former({"a": {"b": 1, "d": 2}}, (MOVED,)) == {"a": {"c": 1, "d": 2}}
    listed = {"list": [{"b": "x", "d": "y"}, {"d": "y"}, 5]}
    assert take_over_former(listed, (OF_ITEMS,)) == {"list": [{"c": "x y", "d": "y"}, {"d": "y"}, 5]}


def test_values_of_another_shape_are_kept_for_their_refusal() -> None:
    for spec in (None, 5, {"a": 5}, {"a": {"c": 1}}, {"list": 5}):
        assert take_over_former(spec, (MOVED, OF_ITEMS)) == spec
        assert find_former(spec, (MOVED, OF_ITEMS)) == []
        assert list_changed(spec, (MOVED, OF_ITEMS)) == {}


def test_warning_names_the_item_and_the_replacement() -> None:
    (refused,) = find_former({"list": [{}, {"b": 1}]}, (MOVED, OF_ITEMS))
    assert str(refused) == "spec.list[1].b: deprecated until 0.4; write c"


def test_members_whose_form_has_changed_are_listed_as_stored() -> None:
    assert list_changed({"a": {"b": 1}, "d": 2}, (MOVED,)) == {"a": {"b": 1}}
    assert list_changed({"shm": {"sizeLimit": "8Gi"}}, KERNEL.former) == {
        "shm": {"sizeLimit": "8Gi"}, "sharedMemory": None,
    }  # fmt: skip


def test_stored_job_and_written_one_are_read() -> None:
    old = resource(shm={"sizeLimit": "8Gi"})
    assert parse_resource(old, KERNEL).spec == parse_resource(resource(sharedMemory="8Gi"), KERNEL).spec
    assert parse_written(old, KERNEL).spec == parse_resource(old, KERNEL).spec


def test_written_members_take_precedence() -> None:
    job = parse_resource(resource(shm={"sizeLimit": "8Gi"}, sharedMemory="9Gi"), KERNEL)
    assert job.spec.shared_memory == "9Gi"


def test_api_server_accepts_fields_with_their_bounds() -> None:
    shm = build_spec_schema(KERNEL)["properties"]["shm"]
    assert list(shm["properties"]) == ["sizeLimit"]
    assert "pattern" in shm["properties"]["sizeLimit"]
    assert shm["description"].startswith("Deprecated until 0.4: write sharedMemory")
    assert "x-kubernetes-validations" not in shm
