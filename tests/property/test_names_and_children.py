"""Names and children, for every input."""

import copy
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_operator.api import child_names, constants
from ddp_operator.api.cel import check_rules
from ddp_operator.api.errors import InvalidManifest
from ddp_operator.features import SCHEMA
from ddp_operator.manifests.children import build_children, build_pod
from ddp_operator.manifests.template import resolve_template
from tests.support.builders import job, resource, template
from tests.support.strategies import FULL, RICH, json, mutated, pod_json

LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
resource_names = st.from_regex(r"[a-z]([-a-z0-9]{0,48}[a-z0-9])?", fullmatch=True)
attempts = st.integers(1, 999_999)
indexes = st.integers(0, constants.MAX_NODES - 1)


@given(resource_names, attempts, indexes)
def test_accepted_name_gives_dns_labels(name: str, attempt: int, index: int) -> None:
    assert check_rules({"metadata": {"name": name}, "spec": FULL["spec"]}, SCHEMA) == []
    host = child_names.pod_host(name, attempt, index)
    labels = [*host.split("."), child_names.job_name(name, attempt), child_names.service_name(name)]
    assert all(LABEL.fullmatch(label) for label in labels), labels
    assert child_names.service_name(name)[0].isalpha()  # a Service has a stricter rule than the other kinds
    assert len(child_names.launcher_config_map_name("f" * 64)) <= 253


@given(
    st.sets(st.tuples(resource_names | st.sampled_from(["a", "a-1", "a-1-1", "a-1-2"]), attempts, indexes), min_size=2)
)
def test_no_two_pods_share_name(places: set[tuple[str, int, int]]) -> None:
    hosts = {child_names.pod_host(*place) for place in places}
    jobs = {child_names.job_name(name, attempt) for name, attempt, _ in places}
    assert len(hosts) == len(places)
    assert len(jobs) == len({(name, attempt) for name, attempt, _ in places})


@given(resource_names, attempts)
def test_job_is_known_as_its_resources_own(name: str, attempt: int) -> None:
    assert child_names.is_attempt_name(child_names.job_name(name, attempt), name)


@given(st.integers(1, 9), st.integers(1, 50), st.booleans(), st.sampled_from(["Default", "Restricted"]))
def test_building_is_repeatable_and_mutates_nothing(attempt: int, nodes: int, suspend: bool, profile: str) -> None:
    raw = resource(template=RICH, suspend=suspend, securityProfile=profile, checkpoint={"path": "/c"})
    typed = job(**copy.deepcopy(raw["spec"]))
    before = copy.deepcopy(typed)
    first = build_children(typed, attempt=attempt, nodes=nodes)
    kept = copy.deepcopy(first)
    assert build_children(typed, attempt=attempt, nodes=nodes) == first
    # A caller's changes of its objects do not affect another caller.
    first[-1]["spec"]["template"]["spec"]["containers"][0]["env"].append({"name": "X"})
    first[0]["metadata"]["labels"]["x"] = "y"
    assert build_children(typed, attempt=attempt, nodes=nodes) == kept
    assert typed == before


def build_or_refuse(made: Any) -> None:
    try:
        typed = job(template=made)
        resolve_template(typed)
    except InvalidManifest:
        return
    *others, child = build_children(typed, attempt=1, nodes=2)
    build_pod(child | {"metadata": child["metadata"] | {"uid": "u"}}, 0, suffix="abcde")
    assert {"Secret", "Service", "ConfigMap"} <= {other["kind"] for other in others}


any_containers = st.lists(
    st.dictionaries(st.sampled_from(["name", "image", "command", "args", "env"]), pod_json), max_size=2
)


@given(
    st.one_of(
        st.dictionaries(st.sampled_from(["spec", "metadata", "x"]), json, max_size=3),
        st.dictionaries(st.sampled_from(["spec", "metadata"]), pod_json, min_size=1),
        any_containers.map(lambda containers: template(*containers)),
        mutated(RICH),
    )
)
def test_any_template_is_built_or_refused(made: Any) -> None:
    build_or_refuse(made)


@pytest.mark.parametrize("part", ["initContainers", "volumes", "securityContext", "nodeSelector"])
def test_part_that_is_empty_but_of_another_type_is_refused(part: str) -> None:
    made = {**RICH, "spec": {**RICH["spec"], part: 0}}
    with pytest.raises(InvalidManifest, match=part):
        resolve_template(job(template=made))
