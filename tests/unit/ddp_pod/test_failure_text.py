"""The text that the launcher adds to a failure: ranks and collectives, a path and its owner, a missing module."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from ddp_pod.contract.failure_record import Failure
from ddp_pod.contract.failure_table import CATEGORIES, Outcome
from ddp_pod.contract.names import ENV_LOCAL_POD
from ddp_pod.contract.plan import CodeConfig
from ddp_pod.failures.rules import Judgement, WorkerEnd, classify, judge
from ddp_pod.failures.text import (
    ARGUMENTS_REMEDY,
    advise,
    advise_on_output,
    advise_on_program,
    describe_absence,
)
from ddp_pod.failures.worker_failure import add_last_lines, shorten_mismatch
from ddp_pod.rank.tracebacks import record_exception
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


def advice(code: int, kind: str, message: str, packed: CodeConfig | None = None) -> str:
    end = WorkerEnd(code, kind, message)
    return advise(judge(end, oom_killed=False), end, code=packed)


@pytest.mark.parametrize("message", [PREAMBLE, MISMATCH], ids=["gloo", "torch"])
def test_ranks_in_different_collectives_are_the_scripts_error_with_a_remedy(message: str) -> None:
    outcome = classify(WorkerEnd(1, "RuntimeError", message), oom_killed=False)
    assert outcome == Outcome("UserError", 82)
    assert "the same collectives" in advice(1, "RuntimeError", message)


def test_ranks_in_different_collectives_are_named_with_them() -> None:
    words = "mismatch between collectives: rank 1 is in BROADCAST of shape [1000], rank 0 is in ALLREDUCE of shape [10]"
    assert shorten_mismatch(MISMATCH) == words
    for other in ("boom", PREAMBLE, "Detected mismatch between collectives on ranks"):
        assert shorten_mismatch(other) == other


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
    assert "securityContext.fsGroup" in advice(1, "PermissionError", message)


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
    ("kind", "message", "remedy"),
    [
        ("RuntimeError", "operator torchvision::nms does not exist", "versions that belong together"),
        ("ImportError", "flash.so: undefined symbol: _ZN3c104cuda9SetDeviceEi", "versions that belong together"),
        ("RuntimeError", "Parent directory /ckpt/new does not exist.", "os.makedirs"),
        ("RuntimeError", "[enforce fail at i.cc:747] . open file failed with strerror: Permission denied", "fsGroup"),
        ("RuntimeError", "File /ckpt/last.pt cannot be opened.", "fsGroup"),
        ("OSError", "[Errno 30] Read-only file system: '/data/last.pt'", "mounted without readOnly"),
        ("OSError", "[Errno 28] No space left on device", "the disk or volume is full"),
        ("RuntimeError", "basic_ios::clear: iostream error", "the disk or volume is full"),
        ("FloatingPointError", "Loss is nan, stopping training", "reduce the learning rate"),
        ("RuntimeError", "Function 'SqrtBackward0' returned nan values in its 0th output.", "reduce the learning rate"),
        ("RuntimeError", "The total norm for gradients from `parameters` is non-finite", "reduce the learning rate"),
        ("ValueError", "the loss of step 3 on rank 0 is not a finite number", "reduce the learning rate"),
        ("ValueError", "unknown loss: infonce", "fix the line of the script"),
    ],
)
def test_known_error_message_has_its_remedy(kind: str, message: str, remedy: str) -> None:
    assert remedy in advice(1, kind, message)


def test_hang_has_advice_about_the_line_of_its_rank() -> None:
    remedy = advice(-9, "Hang", "no step for 10 s: rank 1 is in time.sleep")
    assert "why the rank does not leave its line" in remedy
    assert "timeout of init_process_group" in remedy


@pytest.mark.parametrize(
    ("code", "silent", "words"),
    [
        (-11, True, "crashed in native code"),
        (139, True, "crashed in native code"),
        (-24, False, "ulimit -t"),
        (153, False, "ulimit -f"),
        (3, True, "the script ended itself"),
        (0, False, "the script ended itself"),
    ],
)
def test_an_exit_code_without_a_reason_has_its_advice(code: int, silent: bool, words: str) -> None:
    assert words in advise(Judgement(Outcome("Unknown", 82)), WorkerEnd(code), only_exit_code=silent)


@pytest.mark.parametrize(("code", "remedy"), [(-9, "dmesg"), (-15, "kubectl exec"), (130, "kubectl exec")])
def test_signal_that_kernel_never_sends_is_not_blamed_on_memory(code: int, remedy: str) -> None:
    assert remedy in advice(code, "", "")


@pytest.mark.parametrize(("silent", "words"), [(True, "its last lines in the log"), (False, CATEGORIES["OOM"].remedy)])
def test_a_known_category_has_its_remedy_unless_the_script_said_nothing(silent: bool, words: str) -> None:
    assert words in advise(Judgement(Outcome("OOM", 84)), WorkerEnd(1), only_exit_code=silent)


PACKED = CodeConfig("/code", "0" * 64, "/workspace", None, "/packages")
PACKED_WITH_PIP = CodeConfig("/code", "0" * 64, "/workspace", "requirements.txt", "/packages")


@pytest.mark.parametrize(
    ("code", "local", "remedy"),
    [
        (PACKED, False, "list the package of einops in requirements.txt of the packed folder and add --pip; if it is"),
        (PACKED_WITH_PIP, False, "add the package of einops to requirements.txt, or correct the name; if it is a file"),
        (None, True, f"install the package of einops for {sys.executable}, or correct the name or PYTHONPATH"),
        (
            None,
            False,
            "the image lacks einops: install it in the image, or correct the name or PYTHONPATH; `ddp submit",
        ),
    ],
)
def test_missing_module_has_the_remedy_of_where_the_code_comes_from(
    code: CodeConfig | None, local: bool, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(ENV_LOCAL_POD, raising=False)
    if local:
        monkeypatch.setenv(ENV_LOCAL_POD, "uid")
    assert advice(1, "ModuleNotFoundError", "No module named 'einops'", code).startswith(remedy)


@pytest.mark.parametrize(
    ("code", "local", "remedy"),
    [
        (None, False, "`ddp submit job.yaml --workdir DIR`"),
        (None, True, "run ddp in the folder that has it"),
        (PACKED, False, "--include PATH packs it"),
    ],
)
def test_missing_script_has_the_remedy_of_where_the_code_comes_from(
    code: CodeConfig | None, local: bool, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(ENV_LOCAL_POD, raising=False)
    if local:
        monkeypatch.setenv(ENV_LOCAL_POD, "uid")
    assert remedy in advise_on_program(code)


@pytest.mark.parametrize(
    "message",
    ["train.py: error: unrecognized arguments: --epoch3 4", "click.exceptions.NoSuchOption: No such option: --epoch3"],
)
def test_wrong_arguments_of_the_script_have_the_arguments_as_remedy(message: str) -> None:
    assert advice(2, "SystemExit", message) == ARGUMENTS_REMEDY
    assert advice(3, "SystemExit", message) != ARGUMENTS_REMEDY


def test_usage_in_the_last_lines_of_a_program_has_the_arguments_as_remedy(tmp_path: Path) -> None:
    (tmp_path / "output").mkdir()
    (tmp_path / "output" / "0.end").write_text(
        "usage: train.py [-h] [--lr LR]\ntrain.py: error: unrecognized arguments: -x\n"
    )
    pod = launcher_pod(tmp_path)
    assert add_last_lines(pod, Failure(local_rank=0, exit_code=2, remedy="the log")).remedy == ARGUMENTS_REMEDY
    assert add_last_lines(pod, Failure(local_rank=0, exit_code=1, remedy="the log")).remedy == "the log"


def test_known_message_in_last_lines_of_silent_exit_has_its_remedy(tmp_path: Path) -> None:
    (tmp_path / "output").mkdir()
    (tmp_path / "output" / "0.end").write_text("Loss is nan, stopping training\n")
    pod = launcher_pod(tmp_path)
    assert "learning rate" in add_last_lines(pod, Failure(local_rank=0, exit_code=3, remedy="the log")).remedy
    for code in (82, 137):  # chosen by the script, killed from outside
        assert add_last_lines(pod, Failure(local_rank=0, exit_code=code, remedy="the log")).remedy == "the log"


@pytest.mark.parametrize(
    "text",
    [
        "mkdir: cannot create directory 'work': File exists",
        "fatal: destination path 'x' already exists and is not an empty directory.",
        "E: Could not get lock /var/lib/apt/lists/lock. It is held by process 12 (apt-get)",
        "fatal: Unable to create '/x/.git/index.lock': File exists.",
        "mv: cannot move 'a' to 'b/a': Directory not empty",
    ],
)
def test_collision_of_commands_that_each_rank_runs_is_explained(text: str) -> None:
    assert "runs once in each of the 4 ranks of the pod" in advise_on_output(text, 1, 4)
    assert "in each of" not in advise_on_output(text, 1, 1)
    assert "in each of" not in advise_on_output("exit 3", 3, 4)
