"""One failure from a rank's error file to ``status.lastFailure``: each field keeps its value on the way."""

from __future__ import annotations

import dataclasses
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import cast

import pytest

from ddp_operator.api.kubeobjects import truncate
from ddp_operator.api.status import LastFailure, Status
from ddp_operator.decide.decide import decide
from ddp_operator.reading.objects import view_pod
from ddp_operator.reading.terminations import parse_termination
from ddp_pod.base.service import Conclusion
from ddp_pod.contract.failure_record import Failure
from ddp_pod.contract.pod_end import PodEnd
from ddp_pod.contract.progress import RankProgress, Uploads
from ddp_pod.contract.records import read_record, to_json
from ddp_pod.failures.agent_failure import AgentEnd
from ddp_pod.failures.restarts import InPlaceRestarts
from ddp_pod.failures.rules import WorkerEnd
from ddp_pod.failures.termination import conclude, encode_end
from ddp_pod.failures.worker_failure import examine_worker
from ddp_pod.progress.rank_progress import RankReader
from ddp_pod.rank.tracebacks import record_exception
from tests.support.builders import child_job, child_pod, job, observe
from tests.support.launcher_config import launcher_pod

STEP = 132.0
PROGRESS = RankProgress(step=STEP, loss=0.25)


class RankMetrics:
    """Metrics of a rank that has reached a step."""

    reads_log = False

    def count_steps(self, rank: int) -> int | None:
        """Return no count: the ranks report their steps themselves."""
        return None

    def step(self, rank: int) -> float:
        """Return the step of each rank."""
        return STEP

    def progress(self) -> RankProgress:
        """Return the last values of the lowest rank."""
        return PROGRESS


def raise_error() -> None:
    raise KeyError("labels")


def write_error_file(folder: Path) -> None:
    (folder / "errors").mkdir()
    with pytest.raises(KeyError) as caught:
        raise_error()
    record_exception(
        caught.value, str(folder / "errors" / "1.json"), {"rank": 3, "localRank": 1, "restart": 0, "started": 0.0}
    )


def test_every_field_has_the_same_value_from_error_file_to_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = datetime.now(UTC)
    write_error_file(tmp_path)
    (tmp_path / "workers").mkdir()
    pod = launcher_pod(tmp_path, nodes=2, node=1, oom_kills=1 << 30)

    # The agent classifies the failure and sends it to the launcher.
    examined = examine_worker(pod, WorkerEnd(1, rank=3, local_rank=1))
    received = read_record(Failure, json.loads(json.dumps(to_json(examined))))
    assert received == examined

    # The launcher concludes, and writes the termination message.
    message_file = tmp_path / "termination"
    monkeypatch.setenv("DDP_TERMINATION_LOG", str(message_file))
    restarts = InPlaceRestarts(pod, cast(RankReader, RankMetrics()))
    restarts.observe([received])
    restarts.count = 2
    code = conclude(
        pod,
        AgentEnd("failed"),
        1,
        restarts,
        cast(RankReader, RankMetrics()),
        Conclusion(uploads=Uploads(step=100.0)),
        stopped=False,
        final=[],
        remaining={},
    )
    expected = dataclasses.replace(examined, restarts=2, step=STEP)
    message = json.loads(message_file.read_text())
    assert read_record(PodEnd, message) == PodEnd(**vars(expected), progress=PROGRESS, uploads=Uploads(step=100.0))
    assert code == expected.container_exit_code == 81

    # The operator parses it, decides, and writes the status.
    failed = child_pod(1, "Failed", code=code, message=message, at=now)
    termination = view_pod(failed).termination
    assert termination is not None
    assert {name: getattr(termination, name) for name in vars(expected)} == vars(expected)
    status = Status(attempt=1, job_name="train-1", start_time=now).remember(nodes=2)
    typed = job(status=status, nodes=2)
    decision = decide(typed, observe(typed, (child_job(),), (child_pod(0), failed)), now + timedelta(seconds=1))
    assert decision.status.last_failure == LastFailure(
        attempt=1,
        rank=expected.rank,
        pod_index=expected.pod_index,
        pod=failed["metadata"]["name"],
        node_name=failed["spec"]["nodeName"],
        exit_code=expected.exit_code,
        category=expected.category,
        message=expected.message,
        traceback=expected.traceback,
        remedy=expected.remedy,
        time=truncate(datetime.fromtimestamp(expected.time or 0, UTC)),
        signature=expected.signature,
        step=int(STEP),
        conclusion=f"not restarted: each attempt would end with {expected.signature}; exit code 82 would restart it "
        "anyway",
    )
    assert (expected.category, expected.rank, expected.exit_code) == ("UserError", 3, 1)
    assert expected.message == "KeyError: 'labels'"
    assert expected.signature.startswith("KeyError at test_failure_record.py:")


@pytest.mark.parametrize(
    ("exception", "interrupted", "code"),
    [("SystemExit", True, 85), ("SystemExit", False, 82), ("ValueError", True, 82)],
)
def test_rank_that_exited_before_stop_does_not_decide_if_peer_was_stopped_first(
    tmp_path: Path, exception: str, interrupted: bool, code: int
) -> None:
    pod = launcher_pod(tmp_path, nodes=2, node=1)
    for folder in ("workers", "errors"):
        (tmp_path / folder).mkdir()
    metrics = cast(RankReader, RankMetrics())
    final = [Failure("UserError", 82, rank=1, local_rank=0, exit_code=143, exception_type=exception)]
    end = AgentEnd("signal", interrupted=interrupted)
    restarts = InPlaceRestarts(pod, metrics)
    assert conclude(pod, end, 1, restarts, metrics, Conclusion(), stopped=True, final=final, remaining={}) == code


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
    metrics = cast(RankReader, RankMetrics())
    restarts = InPlaceRestarts(pod, metrics)
    code = conclude(
        pod, AgentEnd(), 1, restarts, metrics, Conclusion(), stopped=stopped, final=[], remaining={}, awaited=awaited
    )
    assert (code == 85) is stopped
    end = parse_termination(code, text=message_file.read_text())
    cause = end.awaited
    assert cause is not None
    assert (cause.category, cause.rank, cause.message, cause.exit_code) == ("Hang", 1, awaited.message, None)
    assert len(cause.traceback) < 1500


@pytest.mark.parametrize("text", ["line\n" * 5000 + "boom\n", "ä€\U0001f3d6" * 4000, "\ud800\x00" * 3000, "short"])
def test_message_fits_and_keeps_the_end_of_the_traceback_and_the_beginning_of_other_texts(text: str) -> None:
    end = PodEnd(
        "UserError", 82, message=text, traceback=text, remedy="do this", last_failure=Failure("OOM", message=text)
    )
    data = encode_end(end)
    assert len(data) <= 4096
    members = json.loads(data.decode("utf-8"))
    assert (members["category"], members["version"]) == ("UserError", 2)
    assert text.encode("utf-8", "replace").decode().endswith(members.get("traceback", ""))
    if text == "short":
        assert read_record(PodEnd, members) == end
    else:
        assert members["message"] or members["remedy"] == "do this"
