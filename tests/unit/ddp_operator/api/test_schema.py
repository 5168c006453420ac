"""The kernel's spec with fields of features: decoding, reading, and faults of checks."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
import pytest
from msgspec import Meta

from ddp_operator.api.cel import check_rules
from ddp_operator.api.errors import InvalidManifest
from ddp_operator.api.faults import FAULTS
from ddp_operator.api.parse import parse_resource
from ddp_operator.api.rule_builders import require
from ddp_operator.api.schema import KERNEL, OwnFields, Schema
from ddp_operator.api.spec import Recovery, SpecFields
from ddp_operator.api.written import parse_written
from ddp_operator.manifests.template import resolve_template
from tests.support.builders import resource
from tests.support.decisions import present
from tests.support.fake_features import complete_by
from tests.support.fields import change, list_refused, store


class Soup(SpecFields, frozen=True, kw_only=True):
    """A group of a feature."""

    salt: int
    is_hot: bool = True


class SoupFields(SpecFields, frozen=True, kw_only=True):
    """Members of the spec."""

    soup: Annotated[Soup | None, Meta(description="Soup for the ranks.")] = None


class SpoonFields(SpecFields, frozen=True, kw_only=True):
    """Members of two groups of the kernel."""

    spoon: Literal["Large", "Small"] | None = None


SOUP = OwnFields(
    "soup", SoupFields, fixed_once="run", rules=(require("soup", "self.soup.salt > 0", "needs salt; add it"),)
)
SPOON = OwnFields("spoon", SpoonFields, at="recovery")
LID = OwnFields("lid", SpoonFields, at="checkpoint")
SCHEMA = Schema((SOUP, SPOON, LID))
CHECKPOINT = {"path": "/c", "spoon": "Small"}


def test_each_feature_reads_its_own_part() -> None:
    spec = parse_resource(
        resource(soup={"salt": 2}, recovery={"spoon": "Large", "maxRestarts": 9}, checkpoint=CHECKPOINT), SCHEMA
    ).spec
    assert SOUP.read(spec).soup == Soup(salt=2)
    assert (SPOON.read(spec).spoon, LID.read(spec).spoon) == ("Large", "Small")
    assert isinstance(spec.recovery, Recovery)
    assert spec.recovery.max_restarts == 9
    stored = msgspec.to_builtins(spec)
    assert (stored["soup"], stored["recovery"], stored["checkpoint"]) == (
        {"salt": 2},
        {"spoon": "Large", "maxRestarts": 9},
        CHECKPOINT,
    )


def test_unset_part_is_empty() -> None:
    for schema in (SCHEMA, KERNEL):
        spec = parse_resource(resource(), schema).spec
        assert SOUP.read(spec) == SoupFields()
        assert SPOON.read(spec) == LID.read(spec) == SpoonFields()


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"soup": {}}, "spec.soup.salt: Required value"),
        ({"soup": {"salt": "a"}}, 'spec.soup.salt in body must be of type integer: "string"; write a whole number'),
        ({"soup": {"salt": 1, "isHott": 1}}, 'unknown field "spec.soup.isHott"; did you mean isHot?'),
        ({"soup": 1}, "write its fields below it: salt, isHot"),
        ({"recovery": {"spoon": "Huge"}}, 'spec.recovery.spoon: Unsupported value: "Huge": supported values: "Large"'),
        ({"sop": {}}, 'unknown field "spec.sop"; did you mean soup?'),
    ],
)
def test_wrong_value_is_refused_as_those_of_kernel(spec: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidManifest) as error:
        parse_written(resource(**spec), SCHEMA)
    assert words in str(error.value)
    with pytest.raises(InvalidManifest, match=r"^spec"):
        parse_resource(resource(**spec), SCHEMA)


@pytest.mark.parametrize("spec", [{"soup": {"salt": 1}}, {"recovery": {"spoon": "Large"}}, {"checkpoint": CHECKPOINT}])
def test_kernel_alone_refuses_fields_of_features(spec: dict[str, Any]) -> None:
    with pytest.raises(InvalidManifest, match="unknown field"):
        parse_resource(resource(**spec), KERNEL)


def test_group_of_no_kernel_is_refused() -> None:
    with pytest.raises(AssertionError, match="groups nothing"):
        Schema((OwnFields("soup", SoupFields, at="nothing"),))


def test_rules_over_several_fields_apply_once_spec_is_complete() -> None:
    item = change(store(SCHEMA), "spec.soup", {"salt": 0})
    assert list_refused(item, SCHEMA) == ["spec.soup"]
    with_menu = Schema((SOUP, present(complete_by().fields)))
    assert list_refused(item, with_menu) == ["spec.soup"]
    assert check_rules(change(item, "spec.menu", "day"), with_menu) == []
    old = change(item, "spec.soup", {"salt": 1}) | {"status": {"attempt": 1, "firstRunTime": "2026-11-20T12:00:00Z"}}
    assert list_refused(change(old, "spec.soup.salt", 2), SCHEMA, old) == ["spec"]
    assert "soup" in SCHEMA.list_fixed("run")


def test_fault_of_check_refuses_job_and_is_counted() -> None:
    def check(*_: Any) -> Any:
        yield from ()
        raise ZeroDivisionError("a bug")

    schema = Schema((OwnFields("soup", SoupFields, check=check),))
    before = FAULTS.counts["feature soup"]
    with pytest.raises(InvalidManifest, match=r"^spec\.soup: the feature soup .*ZeroDivisionError: a bug"):
        resolve_template(parse_resource(resource(soup={"salt": 1}), schema))
    assert FAULTS.counts["feature soup"] == before + 1
    resolve_template(parse_resource(resource(), schema))  # of a job that asks for nothing of the feature
    assert FAULTS.counts["feature soup"] == before + 2
