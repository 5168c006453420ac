"""Times and quantities as Kubernetes writes them."""

from __future__ import annotations

from datetime import datetime, timedelta
from decimal import Decimal
from fnmatch import fnmatchcase
from typing import Any

import pytest

from ddp_operator.api.kubeobjects import (
    GPU_RESOURCES,
    count_gpus,
    find_limits,
    is_gpu,
    parse_quantity,
    parse_time,
)
from tests.support.builders import NOW


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("2026-11-20T12:00:00Z", NOW),
        ("2026-11-20T13:00:00+01:00", NOW),
        ("2026-11-20T12:00:00", NOW),
        ("2026-11-20T12:00:00.5Z", NOW + timedelta(seconds=0.5)),
        ("yesterday", None),
        ("", None),
        (None, None),
        (3, None),
    ],
)
def test_rfc3339_time_is_parsed(text: Any, moment: datetime | None) -> None:
    assert parse_time(text) == moment


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1", 1), (2, 2), (0.5, "0.5"), ("500m", "0.5"), ("1.5", "1.5"), ("2.", 2), (".5", "0.5"), ("1k", 1000),
        ("1Ki", 1024), ("2Gi", 2 * 2**30), ("1e3", 1000), ("1E-1", "0.1"), ("100u", "0.0001"), ("+3", 3),
        ("-1", -1), ("0", 0),
    ],
)  # fmt: skip
def test_quantity_of_kubernetes_is_parsed(text: Any, number: Any) -> None:
    assert parse_quantity(text) == Decimal(str(number))


@pytest.mark.parametrize(
    "value", ["", "x", "1x", "1 Gi", "1gi", True, None, [], {}, float("nan"), float("inf"), "1e999", "--1", " 4 "]
)
def test_invalid_quantity_is_parsed_as_none(value: Any) -> None:
    assert parse_quantity(value) is None


@pytest.mark.parametrize(
    ("resources", "count"),
    [
        ({}, 0),
        ({"limits": {"nvidia.com/gpu": "4"}}, 4),
        ({"limits": {"nvidia.com/gpu": 4}}, 4),
        ({"requests": {"nvidia.com/gpu": 2}}, 2),
        ({"requests": {"nvidia.com/gpu": 2}, "limits": {"nvidia.com/gpu": 2}}, 2),
        ({"limits": {"amd.com/gpu": 1, "nvidia.com/mig-1g.5gb": 2}}, 3),
        ({"limits": {"nvidia.com/gpu.shared": 1}}, 1),
        ({"limits": {"example.com/gpu": 8, "cpu": "4"}}, 0),
        ({"limits": {"nvidia.com/gpu": "many"}}, 0),
        ({"limits": None, "requests": []}, 0),
        ({"limits": {"nvidia.com/gpu": -2}}, 0),
    ],
)
def test_gpus_are_counted_by_names_of_device_plugins(resources: Any, count: int) -> None:
    assert count_gpus(resources) == count


GPUS = {
    "nvidia.com/gpu": "nvidia.com/gpu",
    "nvidia.com/gpu.shared": "nvidia.com/gpu.shared",
    "nvidia.com/mig-1g.5gb": "nvidia.com/mig-?*",
    "nvidia.com/mig-3g.40gb.shared": "nvidia.com/mig-?*",
    "amd.com/gpu": "amd.com/gpu",
    "amd.com/spx_nps1": "amd.com/?px_nps?",
    "amd.com/dpx_nps2": "amd.com/?px_nps?",
    "amd.com/qpx_nps1": "amd.com/?px_nps?",
    "amd.com/cpx_nps1": "amd.com/?px_nps?",
    "amd.com/cpx_nps4": "amd.com/?px_nps?",
    "gpu.intel.com/i915": "gpu.intel.com/i915",
    "gpu.intel.com/xe": "gpu.intel.com/xe",
}


@pytest.mark.parametrize("name", GPUS)
def test_name_of_gpus_is_known(name: str) -> None:
    assert [known for known in GPU_RESOURCES if fnmatchcase(name, known)] == [GPUS[name]]
    assert count_gpus({"limits": {name: "2"}}) == 2


@pytest.mark.parametrize(
    "name",
    [
        *("gpu.intel.com/i915_monitoring", "gpu.intel.com/xe_monitoring", "gpu.intel.com/tiles"),
        *("amd.com/gpu.vram", "amd.com/cpx", "nvidia.com/gpu.product", "nvidia.com/mig-", "example.com/nvidia.com/gpu"),
        *("rdma/hca", "habana.ai/gaudi", "cpu", ""),
    ],
)
def test_name_beside_those_is_no_gpu(name: str) -> None:
    assert not is_gpu(name)


@pytest.mark.parametrize(
    ("pod", "container", "limits"),
    [
        ({}, {}, {}),
        ({}, {"limits": {"cpu": 2}}, {"cpu": 2}),
        ({"limits": {"cpu": 4, "memory": "8Gi"}}, {"limits": {"cpu": 2}}, {"cpu": 2, "memory": "8Gi"}),
        ({"limits": {"cpu": 4}}, {"requests": {"cpu": 1}}, {"cpu": 4}),
        ({"requests": {"cpu": 4}}, None, {}),
    ],
)
def test_limits_of_pod_hold_for_container_without_its_own(pod: Any, container: Any, limits: Any) -> None:
    assert find_limits({"resources": pod}, {"resources": container}) == limits
