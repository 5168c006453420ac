"""`ddp check`: its arguments, output and exit code, with runs and verdicts of the test."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ddp_cli.__main__ import main
from ddp_cli.features.check import command as check
from ddp_cli.features.check.runs import CheckedRun, Request, Runs
from ddp_cli.features.check.verdict import FAILED, NOT_APPLICABLE, PASSED, WARNING, CheckVerdict
from ddp_pod.features.check.contract import RecordingOrder

VERDICTS = [
    CheckVerdict("one group", PASSED, "2 ranks"),
    CheckVerdict("another order each epoch", FAILED, "epoch 0 twice", "train.py:31", "call set_epoch"),
    CheckVerdict("stops in time", NOT_APPLICABLE),
]


def checked(name: str = "reference", **changes: Any) -> CheckedRun:
    values = {"code": 0, "seconds": 2.0, "output": "", "steps": 20, "ranks": 2, "saves": (), **changes}
    return CheckedRun(name=name, order=RecordingOrder(), records=Path(), **values)


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Request]:
    """A folder with a script, and what the command orders."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("signal.signal", lambda number, handler: None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (tmp_path / "train.py").write_text("import torch\n")
    seen: list[Request] = []

    def run_all(runs: Runs) -> list[CheckedRun]:
        seen.append(runs._request)
        return [checked(), checked("repeat", code=143, signalled=1.0)]

    monkeypatch.setattr(Runs, "run_all", run_all)
    monkeypatch.setattr(check, "judge", lambda runs: VERDICTS[:1])
    return seen


@pytest.mark.parametrize(
    ("words", "options"),
    [
        (["train.py"], ["train.py", "--nodes=2"]),
        (["train.py", "--procs", "1", "--cpu"], ["train.py", "--procs=1", "--nodes=2", "--cpu"]),
        (["train.py", "--procs", "2"], ["train.py", "--procs=2"]),
        (["train.py", "--nodes", "1"], ["train.py", "--nodes=1"]),
        (["-m", "package.train", "--env", "A=b c"], ["-m", "package.train", "--nodes=2", "--env=A=b c"]),
        (["job.yaml", "--nodes", "3"], ["-", "--nodes=3"]),
    ],
)
def test_options_of_ddp_run_are_passed_on_with_two_ranks_for_a_script(
    requests: list[Request], words: list[str], options: list[str]
) -> None:
    Path("job.yaml").write_text("kind: DDPTrainingJob\n")
    assert main(["check", *words, "--steps", "8", "--seed", "3", "--", "--lr", "1"]) == 0
    (request,) = requests
    assert request.options == options
    assert (request.arguments, request.steps, request.seed) == (["--lr", "1"], 8, 3)
    assert request.text == ("kind: DDPTrainingJob\n" if "-" in options else "")


@pytest.mark.parametrize(
    ("words", "ranks"),
    [
        (["train.py", "--nodes", "3"], None),
        (["train.py", "--nodes", "3", "--procs", "2"], 6),
        (["job.yaml"], 8),
        (["job.yaml", "--nodes", "1"], None),
    ],
)
def test_more_ranks_than_the_machine_can_run_are_refused(
    requests: list[Request],
    words: list[str],
    ranks: int | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(check, "count_cpus", lambda: 2)
    Path("job.yaml").write_text("kind: ConfigMap\n---\nkind: DDPTrainingJob\nspec: {nodes: 4, procPerNode: 2}\n")
    assert main(["check", *words]) == (0 if ranks is None else 2)
    errors = capsys.readouterr().err
    assert (ranks is not None) is ("a check runs at most" in errors)
    assert ranks is None or f"{ranks} ranks" in errors


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["train.py"], "checking 2 pods of 1 rank (--nodes); --procs sets the ranks of a pod, which share a hash seed"),
        (["train.py", "--procs", "2"], "checking 1 pod of 2 ranks (--procs), which share a hash seed"),
        (["train.py", "--nodes", "1"], "checking 1 pod of 1 rank; most checks compare ranks"),
        (["job.yaml"], "checking 2 pods of 2 ranks (--nodes)"),
        (["job.yaml", "--nodes", "1"], "checking 1 pod of 2 ranks (--procs)"),
    ],
)
@pytest.mark.usefixtures("requests")
def test_first_line_has_the_pods_and_what_ranks_of_one_share(
    words: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("job.yaml").write_text("kind: DDPTrainingJob\nspec: {nodes: 2, procPerNode: 2}\n")
    assert main(["check", *words]) == 0
    assert capsys.readouterr().err.splitlines()[0].startswith(line)


def test_ranks_of_script_train_on_cpus_with_one_gpu(
    requests: list[Request], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for devices, options in (("0", ["--nodes=2", "--cpu"]), ("0,1", ["--nodes=2"])):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices)
        main(["check", "train.py"])
        assert requests[-1].options[1:] == options
    assert "1 GPU" in capsys.readouterr().err


def test_script_is_run_by_its_path_in_the_copied_folder(requests: list[Request], tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code/main.py").write_text("")
    for words, folder, script in (
        (["code/main.py"], tmp_path, "code/main.py"),
        (["code/main.py", "--workdir", "code"], tmp_path / "code", "main.py"),
        ([str(tmp_path / "code/main.py")], tmp_path, "code/main.py"),
    ):
        assert main(["check", *words]) == 0
        assert (requests[-1].folder.resolve(), requests[-1].options[0]) == (folder, script)
    assert main(["check", "code/main.py", "--workdir", "absent"]) == 2


def test_line_of_check_has_state_name_and_reason_and_below_it_the_remedy(
    requests: list[Request], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check, "judge", lambda runs: VERDICTS)
    assert main(["check", "train.py", "--seed", "5"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[:4] == [
        "passed          one group                 2 ranks",
        "failed          another order each epoch  epoch 0 twice",
        "                                          train.py:31: call set_epoch",
        "not applicable  stops in time",
    ]
    assert "1 passed, 1 failed, 1 not applicable" in lines[4]
    assert "--seed 5" in lines[4]


def test_json_has_checks_seed_and_runs(
    requests: list[Request], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check, "judge", lambda runs: VERDICTS)
    assert main(["check", "train.py", "--seed", "5", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["checks"][1] == {
        "check": "another order each epoch",
        "state": "failed",
        "reason": "epoch 0 twice",
        "place": "train.py:31",
        "remedy": "call set_epoch",
    }
    assert document["seed"] == 5
    assert document["runs"][1] == {"name": "repeat", "steps": 20, "seconds": 2.0, "exitCode": 143, "problem": ""}


SUMMARY = (
    "train: Failed after 3s\n  cause:      UserError: no such file\n  hint:       fix it\n  log:        /tmp/x.log\n"
)


@pytest.mark.parametrize(
    ("run", "code", "facts"),
    [
        (checked(code=1, output=SUMMARY), 1, ["exit code 1", "UserError: no such file", "hint:       fix it"]),
        (checked(code=2, steps=0, output="ddp run: refused\nspec.nodes: too many"), 2, ["spec.nodes: too many"]),
        (checked(code=1, steps=0, output=SUMMARY), 1, ["UserError: no such file"]),
        (checked(problem="no rank recorded anything", code=143), 1, ["ended early: no rank recorded anything"]),
        (checked(steps=0), 1, ["without an optimizer step", ".ddpignore"]),
    ],
)
def test_run_that_did_not_end_as_ordered_fails_the_check_with_its_cause(
    requests: list[Request],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    run: CheckedRun,
    code: int,
    facts: Sequence[str],
) -> None:
    monkeypatch.setattr(Runs, "run_all", lambda runs: [run])
    assert main(["check", "train.py"]) == code
    error = capsys.readouterr().err
    assert all(fact in error for fact in facts)
    assert "x.log" not in error


def test_folder_of_the_runs_is_removed_unless_kept(
    requests: list[Request], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    main(["check", "train.py"])
    assert not list(tmp_path.glob("ddp-check-*"))
    main(["check", "train.py", "--keep"])
    (kept,) = tmp_path.glob("ddp-check-*")
    assert str(kept) in capsys.readouterr().err


def test_interrupted_check_removes_the_folder_of_the_runs(
    requests: list[Request], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupt(runs: Runs) -> list[CheckedRun]:
        raise KeyboardInterrupt

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(Runs, "run_all", interrupt)
    assert main(["check", "train.py"]) == 130
    assert not list(tmp_path.glob("ddp-check-*"))


def test_option_of_other_commands_is_refused_with_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["check", "job.yaml", "--quiet"])
    assert ended.value.code == 2
    assert "--quiet; it prints verdicts only" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("state", "code", "strict"), [(PASSED, 0, 0), (WARNING, 0, 1), (NOT_APPLICABLE, 0, 1), (FAILED, 1, 1)]
)
def test_strict_check_fails_for_what_it_cannot_say(
    requests: list[Request], state: str, code: int, strict: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "judge", lambda runs: [CheckVerdict("finite", state)])
    assert main(["check", "train.py"]) == code
    assert main(["check", "train.py", "--strict"]) == strict


@pytest.mark.parametrize(("steps", "is_said"), [(20, False), (12, True)])
def test_cut_of_epochs_is_said_if_it_costs_steps(
    requests: list[Request],
    steps: int,
    is_said: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    reference = dataclasses.replace(checked(steps=steps), order=RecordingOrder(steps=20, batches=6))
    monkeypatch.setattr(Runs, "run_all", lambda runs: [reference])
    assert main(["check", "train.py"]) == 0
    assert ("ended after 12 of 20 steps: a check cuts epochs to 6 batches" in capsys.readouterr().err) == is_said
