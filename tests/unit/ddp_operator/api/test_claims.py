"""The number of GPUs that resource claims give the training container, in every form of a claim."""

from typing import Any

import pytest

from ddp_operator.api.claims import CLAIM_KIND, CLAIM_TEMPLATE_KIND, count_claimed, digest_claims, find_claims
from ddp_operator.api.errors import InvalidManifest
from ddp_operator.api.kubeobjects import GPU_DEVICE_CLASSES
from tests.support.builders import Json, claiming, gpu_claim, job, template, trainer


def count(*requests: Json, uses: Any = ({"name": "gpus"},), kind: str = CLAIM_TEMPLATE_KIND, **spec: Any) -> int:
    typed = job(template=claiming(*uses, kind=kind), **spec).spec
    claim = gpu_claim(*requests, kind=kind)
    return count_claimed(typed, [(reference, claim) for reference in find_claims(typed)])


def exactly(name: str = "r", device: str = "gpu.nvidia.com", **members: Any) -> Json:
    return {"name": name, "exactly": {"deviceClassName": device, **members}}


def first(*counts: int, device: str = "gpu.nvidia.com") -> Json:
    return {"name": "r", "firstAvailable": [{"name": f"{n}", "deviceClassName": device, "count": n} for n in counts]}


@pytest.mark.parametrize("kind", [CLAIM_KIND, CLAIM_TEMPLATE_KIND])
@pytest.mark.parametrize("device", GPU_DEVICE_CLASSES)
def test_device_classes_of_each_vendor_are_gpus(device: str, kind: str) -> None:
    assert count(exactly(device=device, count=4), kind=kind) == 4


@pytest.mark.parametrize(
    ("requests", "gpus"),
    [
        ([exactly()], 1),
        ([exactly(allocationMode="ExactCount", count=8)], 8),
        ([{"name": "r", "deviceClassName": "gpu.amd.com", "count": 2}], 2),  # v1beta1
        ([exactly("a", count=2), exactly("b", count=3)], 5),
        ([exactly("a", count=2), exactly("nic", "rdma.example.com", count=8)], 2),
        ([exactly("a", count=2), exactly("nic", "rdma.example.com", allocationMode="All")], 2),
        ([exactly(count=2), exactly("monitor", adminAccess=True, allocationMode="All")], 2),
        ([first(2, 2)], 2),
        ([first(4)], 4),
        ([], 0),
    ],
)
def test_devices_are_counted_from_request(requests: list[Json], gpus: int) -> None:
    assert count(*requests) == gpus


@pytest.mark.parametrize(
    ("uses", "gpus"),
    [
        ([{"name": "gpus", "request": "a"}], 2),
        ([{"name": "gpus", "request": "a"}, {"name": "gpus", "request": "b"}], 5),
        ([{"name": "gpus"}, {"name": "gpus", "request": "b"}], 5),
        ([{"name": "other"}], 0),
        ([], 0),
    ],
)
def test_container_gets_named_requests(uses: list[Json], gpus: int) -> None:
    assert count(exactly("a", count=2), exactly("b", count=3), uses=uses) == gpus


UNCOUNTABLE: dict[str, tuple[list[Json], str]] = {
    "all": ([exactly(allocationMode="All")], "request r of ResourceClaimTemplate h100 requests All devices"),
    "alternatives": ([first(4, 8)], "request r of ResourceClaimTemplate h100 has alternatives with different numbers"),
    "unknown classes": ([first(2, 4, device="b200"), exactly("s", "a100")], "(requested: a100, b200)"),
    "an unknown class": ([exactly(device="h100")], "no request names a DeviceClass that is known to be of GPUs"),
}


@pytest.mark.parametrize("case", UNCOUNTABLE)
@pytest.mark.parametrize("asked", ["auto", "gpu"])
def test_uncountable_claim_needs_number(case: str, asked: str) -> None:
    requests, words = UNCOUNTABLE[case]
    with pytest.raises(InvalidManifest) as caught:
        count(*requests, procPerNode=asked)
    assert words in str(caught.value)
    assert str(caught.value).endswith("; set spec.procPerNode to a number")


@pytest.mark.parametrize(("case", "gpus"), [("all", 6), ("alternatives", 6), ("an unknown class", 0)])
def test_number_replaces_uncountable_gpus(case: str, gpus: int) -> None:
    assert count(*UNCOUNTABLE[case][0], procPerNode=6) == gpus
    assert count(*UNCOUNTABLE[case][0], procPerNode="cpu") == 0


def test_other_devices_are_ignored_beside_gpu_limits() -> None:
    made = claiming({"name": "gpus"}, resources={"limits": {"nvidia.com/gpu": "4"}})
    typed = job(template=made).spec
    claim = gpu_claim(exactly("nic", "rdma.example.com"))
    assert count_claimed(typed, [(item, claim) for item in find_claims(typed)]) == 0


@pytest.mark.parametrize(
    "spec",
    [None, [], {"spec": "x"}, {"spec": {"devices": []}}, {"spec": {"devices": {"requests": {"name": "r"}}}},
     {"spec": {"devices": {"requests": ["r", {"exactly": [], "firstAvailable": 3}]}}}],
)  # fmt: skip
def test_claim_of_another_shape_in_file_has_no_gpus(spec: Any) -> None:
    typed = job(template=claiming({"name": "gpus"}), procPerNode=2).spec
    assert count_claimed(typed, [(claim, {"spec": spec}) for claim in find_claims(typed)]) == 0


def test_digest_covers_all_inputs_of_count() -> None:
    specs = [
        job(template=claiming({"name": "gpus"})).spec,
        job(template=claiming({"name": "gpus"}), procPerNode=8).spec,
        job(template=claiming({"name": "gpus", "request": "a"})).spec,
        job(template=claiming({"name": "gpus"}, kind=CLAIM_KIND)).spec,
        job(template=claiming({"name": "gpus"}, name="b200")).spec,
    ]
    assert len({digest_claims(spec, find_claims(spec)) for spec in specs}) == len(specs)


@pytest.mark.parametrize(
    "pod",
    [
        {"containers": "x"},
        {"containers": [3]},
        {"containers": [trainer(resources=[])], "resourceClaims": [{"name": "a"}]},
        {"containers": [trainer(resources={"claims": {"name": "a"}})]},
        {"containers": [trainer(resources={"claims": [{"name": "a"}]})], "resourceClaims": {"a": 1}},
        {"containers": [trainer(resources={"claims": [{"name": "a"}]})], "resourceClaims": [{"name": "a"}, "b"]},
        "x",
    ],
)
def test_malformed_claims_give_none(pod: Any) -> None:
    assert find_claims(job(template={**template(), "spec": pod}).spec) == ()
