"""``spec.preflight``: checks of the network before training, and their results."""

from typing import Final

from msgspec.structs import replace

from ddp_operator.api.constants import PREFLIGHT_CHECKS
from ddp_operator.api.status import PreflightStatus, Status
from ddp_operator.decide.hooks import Feature
from ddp_operator.decide.report import format_number
from ddp_operator.decide.state import State
from ddp_operator.decide.views import Pods
from ddp_operator.features.preflight.fields import FIELDS
from ddp_operator.reading.parts import read_report_part
from ddp_pod.contract.report import PreflightResult


def record(state: State, status: Status) -> Status:
    """Return the status with the results in the report of pod 0. They stay when a later report has none."""
    page = state.observation.page
    result = None if page is None else read_report_part(page, "preflight").preflight
    if result is None:
        return status
    known = status.preflight.slowest if status.preflight else ""
    pods = state.observation.pods_of(status.attempt)
    return replace(status, preflight=build_preflight(result, pods, known))


def build_preflight(result: PreflightResult, pods: Pods, known: str = "") -> PreflightStatus:
    """Return the results for the status. ``known``: the slowest pair of the status."""

    rate = result.all_reduce_rate
    return PreflightStatus(
        failed=tuple(check for check in PREFLIGHT_CHECKS if check in result.failed),
        all_reduce_megabytes_per_second=None if rate is None else format_number(rate * 1e-6),
        transport=_describe_transport(result),
        slowest=_describe_slowest_pair(result, pods, known),
    )


def _describe_transport(result: PreflightResult) -> str | None:
    if not result.transport:
        return None
    return f"{result.transport} with GPUDirect RDMA" if result.gpu_direct else result.transport


def _describe_slowest_pair(result: PreflightResult, pods: Pods, known: str) -> str:
    """Return the slowest pair of pods with its nodes, as they were when it was first reported; empty: unknown."""
    rate = None if result.pair_rate is None else format_number(result.pair_rate * 1e-6)
    if len(result.pair) != 2 or not rate:
        return ""
    first, second = result.pair
    pair = f"pods {first} and {second}"
    if known.startswith(f"{pair} (") and known.endswith(f": {rate} MB/s"):
        return known
    nodes = [pods.newest[index].node_name for index in result.pair if index in pods.newest]
    place = f" (nodes {' and '.join(nodes)})" if len(nodes) == 2 and all(nodes) else ""
    return f"{pair}{place}: {rate} MB/s"


FEATURE: Final = Feature(FIELDS.feature, maturity="beta", page="scaling.md", fields=FIELDS, record=record)
