"""Ranks that stop in the middle of a step, on slow disks, for a bad loss, or for a later attempt."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from ddp_sdk import contract
from ddp_trainer.checkpoint.fence import Fence
from tests.support import PATIENCE
from tests.support import trainer_plugins as plugins
from tests.support.trainer_ranks import start, train

pytestmark = pytest.mark.process

DIGITS = ["--preset", "digits-resnet", "--model-width", "4", "--batch-size", "16", "--log-every", "5"]
# Steps of 48 samples a rank: 15 steps an epoch.
LARGE = [*DIGITS, "--model", plugins.INTERRUPTING, "--batch-size", "48", "--dropout", "0.2", "--epochs", "2"]


def newest(folder: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = torch.load(max(folder.glob("step-*.pt")), weights_only=True)
    return loaded


def test_stop_within_step_loses_and_changes_nothing(tmp_path: Path) -> None:
    train(tmp_path, [*LARGE, "--checkpoint-dir", str(tmp_path / "whole")], 2)
    arguments = [*LARGE, "--checkpoint-dir", str(tmp_path / "cut")]
    # SIGTERM to rank 1 in step 9, while an earlier checkpoint is being written to a slow disk.
    environ = {"TEST_INTERRUPT": "1:9:SIGTERM", "TEST_SLOW_DISK": "0.2"}
    with start(tmp_path, [*arguments, "--checkpoint-every-steps", "2"], 2, environ) as ranks:
        assert ranks.codes() == [contract.EXIT_PREEMPTED] * 2, ranks.output(0)
    stopped = newest(tmp_path / "cut")["position"]["step"]
    assert 9 <= stopped <= 15, "within a tenth of a second, and before the epoch's validation ends"
    assert f"preempted: stopped after step {stopped}; checkpoint saved" in ranks.output(0)
    # SIGTERM to rank 1 in the first epoch's validation, of six batches a rank: it is interrupted and repeated later.
    environ = {"TEST_INTERRUPT": "1:3:VALIDATIONSIGTERM"}
    with start(tmp_path, [*arguments, "--eval-batch-size", "32"], 2, environ) as ranks:
        assert ranks.codes() == [contract.EXIT_PREEMPTED] * 2, ranks.output(0)
    assert newest(tmp_path / "cut")["position"]["step"] == 15
    assert "preempted: stopped after step 15" in ranks.output(0)
    assert "validation:" not in ranks.output(0)
    # The machine of rank 1 fails in the second epoch's sixth step: rank 0 ends with an error.
    environ = {"TEST_INTERRUPT": "1:6:SIGKILL"}
    with start(tmp_path, [*arguments, "--checkpoint-every-steps", "1"], 2, environ) as ranks:
        codes = ranks.codes()
    assert codes[1] == -9
    assert codes[0] not in (0, -9)
    assert 15 <= newest(tmp_path / "cut")["position"]["step"] <= 20
    train(tmp_path, arguments, 2)
    whole = newest(tmp_path / "whole")
    cut = newest(tmp_path / "cut")
    assert whole["position"] == cut["position"]
    for name, value in whole["engine"]["model"].items():
        assert torch.equal(value, cut["engine"]["model"][name]), name


def test_nonfinite_loss_on_one_rank_ends_all_and_names_step_and_rank(tmp_path: Path) -> None:
    environ = {"TEST_INTERRUPT": "1:7:NAN", contract.ENV_RUNTIME_DIR: str(tmp_path)}
    arguments = [*DIGITS, "--model", plugins.INTERRUPTING, "--nonfinite", "stop", "--checkpoint-dir", str(tmp_path)]
    with start(tmp_path, arguments, 2, environ) as ranks:
        assert ranks.codes() == [contract.EXIT_USER_ERROR] * 2, ranks.output(0)
    message = "nonfinite: the loss of step 7 on rank 1 is not a finite number"
    assert f"ddp_trainer: error: {message}" in ranks.output(0)
    assert ranks.output(1) == ""
    for rank in range(2):
        assert message in json.loads((tmp_path / "errors" / f"{rank}.json").read_text())["message"]
        page = (tmp_path / "metrics" / f"{rank}.prom").read_text()
        counted = re.search(r"^ddp_nonfinite_losses_total\{.*\} (\S+)$", page, re.MULTILINE)
        assert counted is not None
        assert float(counted[1]) >= 1
    assert not list(tmp_path.glob("step-*"))


def test_attempt_that_is_overtaken_ends_all_its_ranks_and_writes_no_more(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    environ = {contract.ENV_ATTEMPT: "1", contract.ENV_RUN_ID: "uid-1", contract.ENV_RUNTIME_DIR: str(tmp_path)}
    arguments = [*DIGITS, "--epochs", "200", "--checkpoint-every-steps", "5", "--checkpoint-dir", str(folder)]
    with start(tmp_path, arguments, 2, environ) as ranks:
        ranks.wait_for("step 15/")
        deadline = time.monotonic() + PATIENCE
        while not list(folder.glob("step-*.json")):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        Fence(folder, 2, "uid-2").claim()
        before = sorted(path.name for path in folder.iterdir())
        assert ranks.codes() == [contract.EXIT_PEER_LOST] * 2, ranks.output(0)
    message = f"attempt 2 (run uid-2) has taken over {folder}; attempt 1 stops writing and exits"
    assert f"ddp_trainer: error: {message}" in ranks.output(0)
    assert ranks.output(1) == ""
    assert json.loads((tmp_path / "errors" / "1.json").read_text())["message"] == message
    # A temporary file may remain; there is no model, and no later file.
    after = {path.name for path in folder.iterdir()} - set(before)
    assert len({name.split(".")[0] for name in after}) <= 1
    assert not (folder / "model.pt").exists()
    # Its agent starts it again: it is refused before it trains, and existing files stay unchanged.
    kept = sorted(path.name for path in folder.iterdir())
    with start(tmp_path, arguments, 2, environ) as ranks:
        assert ranks.codes() == [contract.EXIT_PEER_LOST] * 2, ranks.output(0)
    assert "training:" not in ranks.output(0)
    assert sorted(path.name for path in folder.iterdir()) == kept
    # The later attempt resumes from it.
    environ |= {contract.ENV_ATTEMPT: "2", contract.ENV_RUN_ID: "uid-2"}
    ranks = train(tmp_path, [*arguments, "--max-steps", "1"], 2, environ)
    assert "resumed from" in ranks.output(0)
