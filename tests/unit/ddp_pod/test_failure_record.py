"""One failure from a rank's error file to ``status.lastFailure``: each field keeps its value on the way."""

from __future__ import annotations

import dataclasses
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import pytest

from ddp_operator.api.kubeobjects import truncate
from ddp_operator.api.status import LastFailure, Status
from ddp_operator.decide.decide import decide
from ddp_operator.decide.failures import parse_termination
from ddp_operator.decide.views import view_pod
from ddp_pod.contract.failure_record import JSON_NAMES, Failure
from ddp_pod.failures.agent_failure import AgentEnd
from ddp_pod.failures.restarts import InPlaceRestarts
from ddp_pod.failures.rules import WorkerEnd
from ddp_pod.failures.termination import conclude
from ddp_pod.failures.worker_failure import examine_worker
from ddp_pod.progress.metrics import MetricsEndpoint
from ddp_pod.rank.tracebacks import record_exception
from tests.support.builders import child_job, child_pod, job, observe
from tests.support.launcher_config import launcher_pod

STEP = 132.0
PROGRESS = {"ddp_step": STEP, "ddp_loss": 0.25}


class RankMetrics:
    """Metrics of a rank that has reached a step."""

    reads_log = False

    def count_steps(self, rank: int) -> int | None:
        """Return no count: the ranks report their steps themselves."""
        return None

    def step(self, rank: int) -> float:
        """Return the step of each rank."""
        return STEP

    def progress(self) -> dict[str, float]:
        """Return the last values of the lowest rank."""
        return PROGRESS


def raise_error() -> None:
    raise KeyError("labels")


def write_error_file(folder: Path) -> None:
    (folder / "errors").mkdir()
    with pytest.raises(KeyError) as caught:
        raise_error()
    record_exception(caught.value, str(folder / "errors" / "1.json"), {"rank": 3, "localRank": 1, "restart": 0})


def test_every_field_has_the_same_value_from_error_file_to_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = datetime.now(UTC)
    write_error_file(tmp_path)
    (tmp_path / "workers").mkdir()
    pod = launcher_pod(tmp_path, nodes=2, node=1, oom_kills=1 << 30)

    # The agent classifies the failure and sends it to the launcher.
    examined = examine_worker(pod, WorkerEnd(1, rank=3, local_rank=1))
    received = Failure.from_json(json.loads(json.dumps(examined.to_json())))
    assert received == examined

    # The launcher concludes, and writes the termination message.
    message_file = tmp_path / "termination"
    monkeypatch.setenv("DDP_TERMINATION_LOG", str(message_file))
    restarts = InPlaceRestarts(pod, cast(MetricsEndpoint, RankMetrics()))
    restarts.observe([received])
    restarts.count = 2
    code = conclude(
        pod,
        AgentEnd("failed"),
        1,
        restarts,
        cast(MetricsEndpoint, RankMetrics()),
        stopped=False,
        final=[],
        uploads={"ddp_checkpoint_upload_step": 100.0},
        remaining={},
    )
    expected = dataclasses.replace(
        examined, restarts=2, step=STEP, progress={**PROGRESS, "ddp_checkpoint_upload_step": 100.0}
    )
    message = json.loads(message_file.read_text())
    assert message == expected.to_json()
    assert code == expected.container_exit_code == 82

    # The operator parses it, decides, and writes the status.
    failed = child_pod(1, "Failed", code=code, message=message, at=now)
    termination = view_pod(failed).termination
    assert termination is not None
    assert {name: getattr(termination, name) for name in JSON_NAMES} == {
        name: getattr(expected, name) for name in JSON_NAMES
    }
    status = Status(attempt=1, attempt_nodes=2, job_name="train-1", start_time=now)
    typed = job(status=status, nodes=2)
    decision = decide(typed, observe(typed, (child_job(),), (child_pod(0), failed)), now + timedelta(seconds=1))
    assert decision.status.last_failure == LastFailure(
        attempt=1,
        rank=expected.rank,
        node=expected.pod_index,
        pod=failed["metadata"]["name"],
        node_name=failed["spec"]["nodeName"],
        exit_code=expected.exit_code,
        category=expected.category,
        message=expected.message,
        traceback=expected.traceback,
        hint=expected.remedy,
        time=truncate(datetime.fromtimestamp(expected.time or 0, UTC)),
        signature=expected.signature,
        step=int(STEP),
    )
    assert (expected.category, expected.rank, expected.exit_code) == ("UserError", 3, 1)
    assert expected.message == "KeyError: 'labels'"
    assert expected.signature.startswith("KeyError at test_failure_record.py:")


@pytest.mark.parametrize("stopped", [True, False], ids=["stopped", "lost its peers"])
def test_rank_outside_of_collectives_is_in_the_message_of_a_pod(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stopped: bool
) -> None:
    pod = launcher_pod(tmp_path, nodes=2, node=1)
    for folder in ("workers", "errors"):
        (tmp_path / folder).mkdir()
    message_file = tmp_path / "termination"
    monkeypatch.setenv("DDP_TERMINATION_LOG", str(message_file))
    awaited = Failure(
        "Hang", 83, rank=1, message="rank 1 is in q.get (train.py:27)", exit_code=137, traceback="x" * 9999
    )
    metrics = cast(MetricsEndpoint, RankMetrics())
    restarts = InPlaceRestarts(pod, metrics)
    code = conclude(
        pod, AgentEnd(), 1, restarts, metrics, stopped=stopped, final=[], uploads={}, remaining={}, awaited=awaited
    )
    assert (code == 85) is stopped
    end = parse_termination(code, text=message_file.read_text())
    cause = parse_termination(82, text=end.awaited)
    assert (cause.category, cause.rank, cause.message, cause.exit_code) == ("Hang", 1, awaited.message, None)
    assert len(end.awaited) <= 1500


def test_every_field_of_the_record_has_a_name_in_json() -> None:
    fields = [field.name for field in dataclasses.fields(Failure)]
    assert list(JSON_NAMES) == fields
    members: dict[str, Any] = Failure().to_json()
    assert set(members) == {"version", *JSON_NAMES.values()}
