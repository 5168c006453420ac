"""How a run ends: one message for the user, the right exit code on every rank, and no hang."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ddp_trainer import contract
from tests.support.trainer_ranks import start, train

pytestmark = pytest.mark.process

DIGITS = ["--preset", "digits-resnet", "--model-width", "4", "--batch-size", "16", "--log-every", "5"]


def _occupied(folder: Path) -> list[str]:
    train(folder / "old", [*DIGITS, "--max-steps", "2", "--checkpoint-dir", str(folder / "ckpt")])
    return ["--checkpoint-dir", str(folder / "ckpt")]


MISTAKES: dict[str, Callable[[Path], list[str]]] = {
    "optim.lr: 0.0 is out of range": lambda folder: ["--lr", "0"],
    "data.dir: CIFAR-10 is not complete in": lambda folder: ["--data", "cifar10", "--data-dir", str(folder)],
    "model.name: module 'no_such_module'": lambda folder: ["--model", "no_such_module:build"],
    "precision.name: fp16 needs a GPU": lambda folder: ["--precision", "fp16", "--device", "cpu"],
    "already holds checkpoints": lambda folder: [*_occupied(folder), "--resume", "never"],
    "does not fit this model or optimizer": lambda folder: [*_occupied(folder), "--model-width", "8"],
    "cannot write to": lambda folder: ["--checkpoint-dir", "/proc/nowhere"],
}


@pytest.mark.parametrize("message", list(MISTAKES))
def test_user_mistake_ends_all_ranks_with_81_and_one_line(message: str, tmp_path: Path) -> None:
    arguments = MISTAKES[message](tmp_path)
    runtime = tmp_path / "runtime"
    with start(tmp_path, [*DIGITS, *arguments], 2, {contract.ENV_RUNTIME_DIR: str(runtime)}) as ranks:
        assert ranks.codes() == [contract.EXIT_USER_ERROR] * 2, ranks.output(0)
    errors = [line for line in ranks.output(0).splitlines() if "error" in line]
    assert len(errors) == 1
    assert errors[0].startswith("ddp_trainer: error: ")
    assert message in errors[0]
    assert "Traceback" not in ranks.output(0)
    assert ranks.output(1) == ""
    for rank in range(2):
        record = json.loads((runtime / "errors" / f"{rank}.json").read_text())
        assert record["rank"] == rank
        assert message in record["message"]


def test_user_error_on_one_rank_ends_all_and_names_rank(tmp_path: Path) -> None:
    # The dataset's function fails on rank 1 alone, as with a folder that is missing on one node.
    (tmp_path / "picky_data.py").write_text(
        "import os\n"
        "from ddp_trainer.data.published import load_digits as digits\n"
        "from ddp_trainer.errors import UserError\n"
        "def load(config):\n"
        "    if os.environ['RANK'] == '1':\n"
        "        raise UserError('data.dir', 'the folder is empty', 'mount it')\n"
        "    return digits(config)\n"
    )
    arguments = [*DIGITS, "--data", "picky_data:load"]
    with start(tmp_path, arguments, 2, {"PYTHONPATH": str(tmp_path)}) as ranks:
        assert ranks.codes() == [contract.EXIT_USER_ERROR] * 2
    assert "ddp_trainer: error: data.dir: the folder is empty (rank 1); mount it" in ranks.output(0)
    assert ranks.output(1) == ""


def test_sigterm_without_checkpoint_folder_still_ends_in_order(tmp_path: Path) -> None:
    with start(tmp_path, [*DIGITS, "--epochs", "50"], hold="step 5/") as ranks:
        ranks.wait_for("step 5/")
        ranks.processes[0].terminate()
        ranks.release()
        assert ranks.codes() == [contract.EXIT_PREEMPTED]
    assert "nothing saved" in ranks.output(0)


def test_last_metrics_page_is_kept(tmp_path: Path) -> None:
    train(tmp_path, [*DIGITS, "--epochs", "1"], 2, {contract.ENV_RUNTIME_DIR: str(tmp_path)})
    for rank in range(2):
        page = (tmp_path / "metrics" / f"{rank}.prom").read_text()
        assert f'ddp_progress_ratio{{rank="{rank}"}} 1.0' in page
        assert f'ddp_validation_accuracy_ratio{{rank="{rank}"}}' in page
