"""`ddp check` on the table of faulty scripts, and on scripts without a fault."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from tests.check.faults import FAULTS, SCRIPTS
from tests.check.running import judge_report, list_alarms, list_failures, note_row, run_check

pytestmark = pytest.mark.process

Record = Callable[[str, object], None]

RIGHT: Final = (
    "mlp", "cnn", "amp", "accumulation", "gan", "ema", "lbfgs", "uneven", "stream", "fsdp", "manual", "counted",
    "augmented", "bucket", "centers", "contrast", "curriculum", "drawn", "functional", "letters", "normalized",
    "recipe", "replay", "shadow", "shards", "swa", "trainer", "unfreeze", "validated",
    "adapters", "callbacks", "detect", "diffusion", "engine", "pipes", "policy", "sharded", "speech", "teacher",
)  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with all scripts, as a user has them."""
    return Path(shutil.copytree(SCRIPTS, tmp_path / "work", ignore=shutil.ignore_patterns("__*__*")))


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_reported_alone(name: str, folder: Path, record_property: Record) -> None:
    fault = FAULTS[name]
    (folder / fault.script).write_text(fault.write())
    began = time.monotonic()

    verdicts = run_check(folder, fault.script)

    judgement = judge_report(fault, verdicts)
    note_row(record_property, name, f"{fault.check} {fault.state}", verdicts, began, judgement)
    failures = list_failures(verdicts)
    assert list(failures) == [fault.check], failures
    assert judgement.line, (verdicts[fault.check], fault.find_lines())


def test_script_without_a_seed_passes_and_is_reported(folder: Path) -> None:
    text = (SCRIPTS / "mlp.py").read_text()
    for line in ("torch.manual_seed(SEED)\n", "torch.manual_seed(1 + rank)\n"):
        assert text.count(line) == 1
        text = text.replace(line, "")
    (folder / "mlp.py").write_text(text)

    verdicts = run_check(folder, "mlp.py")

    assert not list_failures(verdicts)
    assert "torch.manual_seed()" in verdicts["resumes exactly"]["reason"]


@pytest.mark.parametrize(
    ("old", "new"),
    [("signal.signal(signal.SIGTERM, lambda *_: stop.fill_(1))\n", ""), ("if stop or (batch", "if (batch")],
    ids=["no handler", "no save in the end"],
)
def test_steps_that_an_eviction_repeats_are_reported(old: str, new: str, folder: Path) -> None:
    text = (SCRIPTS / "mlp.py").read_text()
    assert text.count(old) == 1
    (folder / "mlp.py").write_text(text.replace(old, new))

    verdicts = run_check(folder, "mlp.py")

    assert not list_failures(verdicts)
    assert "repeats the steps since the last checkpoint" in verdicts["stops in time"]["reason"]


def test_average_that_is_not_saved_is_reported(folder: Path) -> None:
    text = (SCRIPTS / "ema.py").read_text()
    assert text.count("average=average, ") == 1
    (folder / "ema.py").write_text(text.replace("average=average, ", ""))

    verdicts = run_check(folder, "ema.py")

    assert list(list_failures(verdicts)) == ["resumes exactly"]
    assert "AveragedModel changes at each step and is not restored" in verdicts["resumes exactly"]["reason"]


@pytest.mark.parametrize("script", RIGHT)
def test_right_script_has_no_failed_check(script: str, folder: Path, record_property: Record) -> None:
    began = time.monotonic()

    verdicts = run_check(folder, f"{script}.py")

    note_row(record_property, f"{script}.py", "nothing", verdicts, began)
    assert list_alarms(verdicts) == {}
    assert verdicts["resumes exactly"]["state"] == ("not applicable" if script == "uneven" else "passed")
