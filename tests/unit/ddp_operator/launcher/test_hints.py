"""What the launcher adds to a failure: the ranks and collectives, the path and its owner, what was not found."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ddp_operator.launcher.failure import classify, name_mismatch
from ddp_operator.launcher.failure_table import CATEGORIES, Outcome
from ddp_operator.launcher.hints import advise
from ddp_operator.launcher.rendezvous import describe_absence
from ddp_operator.launcher.tracebacks import record_exception
from tests.support.launcher_config import launcher_pod

PREAMBLE = (
    "[enforce fail at /pytorch/third_party/gloo/transport/tcp/pair.cc:446] op.preamble.length <= op.nbytes. 40 vs 4"
)
MISMATCH = (
    "Detected mismatch between collectives on ranks. "
    "Rank 1 is running collective: CollectiveFingerPrint(SequenceNumber=3, OpType=BROADCAST, TensorShape=[1000], "
    "TensorDtypes=Float, TensorDeviceTypes=TensorOptions(dtype=float, memory_format=(nullopt))), but "
    "Rank 0 is running collective: CollectiveFingerPrint(SequenceNumber=3, OpType=ALLREDUCE, TensorShape=[10], "
    "TensorDtypes=Float).Collectives differ in the following aspects: \t Op type"
)


@pytest.mark.parametrize("message", [PREAMBLE, MISMATCH], ids=["gloo", "torch"])
def test_ranks_in_different_collectives_are_the_scripts_error_with_a_remedy(message: str) -> None:
    outcome = classify(1, "RuntimeError", message, oom_killed=False)
    assert outcome == Outcome("UserError", 82)
    failure = {"type": "RuntimeError", "message": message, "exitCode": 1, "outcome": outcome}
    assert "the same collectives" in advise(failure, silent=False)


def test_ranks_in_different_collectives_are_named_with_them() -> None:
    words = "mismatch between collectives: rank 1 is in BROADCAST of shape [1000], rank 0 is in ALLREDUCE of shape [10]"
    assert name_mismatch(MISMATCH) == words
    for other in ("boom", PREAMBLE, "Detected mismatch between collectives on ranks"):
        assert name_mismatch(other) == other


def test_a_denied_permission_names_the_path_its_owner_and_the_process(tmp_path: Path) -> None:
    path = tmp_path / "0.json"
    folder = tmp_path / "claim"
    folder.mkdir(mode=0o750)
    denied = PermissionError(13, "Permission denied", str(folder / "new" / "step-1.pt"))
    record_exception(denied, str(path), {"rank": 0, "localRank": 0, "restart": 0})
    message = json.loads(path.read_text())["message"]
    own = f"process of uid {os.geteuid()}, groups "
    assert message.startswith(f"[Errno 13] Permission denied: '{folder}/new/step-1.pt' ({own}")
    assert message.endswith(f"; {folder} is owned by uid {os.geteuid()}, group {folder.stat().st_gid}, mode 0750)")
    failure = {"type": "PermissionError", "message": message, "exitCode": 1, "outcome": Outcome("UserError", 82)}
    assert "securityContext.fsGroup" in advise(failure, silent=False)


@pytest.mark.parametrize(
    ("problem", "remedy"),
    [
        ("name does not resolve yet", "the cluster's DNS"),
        ("nothing listens there yet", "the log of pod 0"),
        ("", "NetworkPolicy"),
    ],
)
def test_a_pod_zero_that_is_not_found_is_told_by_the_problem(problem: str, remedy: str, tmp_path: Path) -> None:
    pod = launcher_pod(tmp_path, master="train-1-0.train")
    message, hint = describe_absence(pod, problem)
    assert remedy in hint
    assert "train-1-0.train" in message


@pytest.mark.parametrize(
    ("code", "silent", "words"),
    [
        (-11, True, "crashed in native code"),
        (139, True, "crashed in native code"),
        (3, True, "the script ended itself"),
        (0, False, "the script ended itself"),
    ],
)
def test_an_exit_code_without_a_reason_has_its_advice(code: int, silent: bool, words: str) -> None:
    failure = {"type": "", "message": "", "exitCode": code, "outcome": Outcome("Unknown", 82)}
    assert words in advise(failure, silent=silent)


@pytest.mark.parametrize(("silent", "words"), [(True, "its last lines in the log"), (False, CATEGORIES["OOM"].remedy)])
def test_a_known_category_has_its_remedy_unless_the_script_said_nothing(silent: bool, words: str) -> None:
    failure = {"type": "", "message": "", "exitCode": 1, "outcome": Outcome("OOM", 84)}
    assert words in advise(failure, silent=silent)
