"""The failure of a pod whose preflight has failed."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_pod.contract.failure_table import Outcome
from ddp_pod.failures.agent_failure import examine_agent_error
from ddp_pod.features.preflight.checks import PreflightError, PreflightReport
from tests.support.launcher_config import launcher_pod

REPORT = PreflightReport(seconds={}, problems={}, transport="Socket")


@pytest.mark.parametrize(
    ("error", "category", "message", "remedy"),
    [
        (
            PreflightError({"allreduce": "NCCL error"}, REPORT._replace(nccl_failed=True)),
            "NCCL",
            "allreduce: NCCL error",
            "another rank",
        ),
        (PreflightError({"tcp": "nccl:1"}, REPORT), "Network", "tcp: nccl:1", "another rank"),
        (
            PreflightError({"transport": "uses Socket", "pairs": "slow"}, REPORT),
            "Network",
            "transport: uses Socket; pairs: slow",
            "docs/scaling.md",
        ),
        (
            PreflightError({"transport": "not known"}, REPORT._replace(transport=None)),
            "NCCL",
            "transport: not known",
            "docs/scaling.md",
        ),
    ],
)
def test_failed_check_has_its_outcome_message_and_remedy(
    error: PreflightError, category: str, message: str, remedy: str, tmp_path: Path
) -> None:
    failure = examine_agent_error(launcher_pod(tmp_path), error)
    assert failure.outcome == Outcome(category, 82)
    assert message in failure.message
    assert remedy in failure.remedy
    assert failure.exception_type == "PreflightError"
