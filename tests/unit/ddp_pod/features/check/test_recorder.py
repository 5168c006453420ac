"""What a rank of a check records: the batches of a step, and facts of its optimizer, loaders and files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ddp_pod.base.files import write_json
from ddp_pod.contract.records import to_json
from ddp_pod.features.check.contract import COMPLETED, END, ERROR, IDLE_SUFFIX, ORDER_FILE, RecordingOrder
from ddp_pod.features.check.recorded_data import Batches
from ddp_pod.features.check.recorder import Recorder
from ddp_pod.rank.groups import GroupRecorder


def build_recorder(folder: Path) -> Recorder:
    write_json(str(folder / ORDER_FILE), to_json(RecordingOrder()))
    recorder = Recorder(str(folder), 0, 1, GroupRecorder(str(folder), 0))
    recorder._torch = torch
    return recorder


def test_batch_of_an_evaluation_before_the_first_step_is_discarded(tmp_path: Path) -> None:
    """As that of Lightning's sanity check; a model of which the trained one has no part keeps its batches."""
    recorder = build_recorder(tmp_path)
    teacher = nn.Linear(2, 2)
    model = nn.Sequential(nn.Linear(2, 2))
    for module, loader in ((teacher, 1), (model[0], 2)):
        recorder._data._unused[loader] = 70 + loader
        module.eval()
        recorder._note_call(module, (), {})
    recorder._data._unused[3] = 73
    model.train()

    recorder._note_call(model, (torch.ones(1, 2),), {})

    assert recorder.is_active
    assert recorder._data.take() == Batches([73], [3])


def run_script(folder: Path, name: str) -> dict[str, list[dict[str, Any]]]:
    """Run a script of this folder; return its records by kind."""
    write_json(str(folder / ORDER_FILE), to_json(RecordingOrder(folder=str(folder / "copy"))))
    script = Path(__file__).with_name(name)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run(
        [sys.executable, str(script), str(folder)], env=environment, capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    records: dict[str, list[dict[str, Any]]] = {}
    for line in (folder / "0.0.jsonl").read_text().splitlines():
        record = json.loads(line)
        records.setdefault(record["event"], []).append(record)
    return records


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Return the records of ``recorded_script.py`` by kind."""
    return run_script(tmp_path_factory.mktemp("records"), "recorded_script.py")


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Return the records of ``recorded_models.py`` by kind."""
    return run_script(tmp_path_factory.mktemp("records"), "recorded_models.py")


Records = dict[str, list[dict[str, Any]]]


def test_parameters_without_an_optimizer_are_recorded(recorded: Records) -> None:
    for step in recorded["step"]:
        assert step["unoptimized"] == ["head.weight", "head.bias"]
        assert step["foreign"] == 2  # the head that was replaced


def test_batches_have_their_order_and_their_samples(recorded: Records) -> None:
    trained = [batch for batch in recorded["batch"] if batch["loader"] == 0]
    assert [batch["iteration"] for batch in trained] == [1, 1, 2, 2]
    assert [batch["descents"] for batch in trained] == [1, 1] * 2
    assert [batch["indices"] for batch in trained[:2]] == [batch["indices"] for batch in trained[2:]]
    assert len({sample for batch in trained for sample in batch["samples"]}) == 4
    streamed = [batch for batch in recorded["batch"] if batch["loader"] == 1]
    assert [batch.get("indices", "") for batch in streamed] == ["", ""]
    assert [len(set(batch["samples"])) for batch in streamed] == [1, 1]
    assert len({batch["content"] for batch in recorded["batch"]}) == 4


def test_loader_names_its_setter_and_its_state(recorded: Records) -> None:
    loader = recorded["loader"][0]
    assert (loader["setter"], "batch_sampler.epoch=0" in loader["state"]) == ("batch_sampler", True)


def test_validation_without_eval_is_no_training_data(recorded: Records) -> None:
    assert [step["loaders"] for step in recorded["step"]] == [[0]] * 4


def test_draws_of_a_model_and_the_line_of_the_scheduler_are_recorded(recorded: Records) -> None:
    draws = [dict(draw.split("=") for draw in step["draws"]) for step in recorded["step"]]
    assert len({step["model torch"] for step in draws}) == 4
    assert not [step for step in recorded["step"][:2] if "scheduled" in step]  # not that of the constructor
    assert "recorded_script.py" in recorded["step"][-1]["scheduled"]


def test_save_of_a_kept_reference_has_the_step_that_took_it(recorded: Records) -> None:
    best, *others = recorded["save"]
    assert (best["taken"], best["step"]) == (0, 4)
    assert "recorded_script.py" in best["takenPlace"]
    assert not [save for save in others if "taken" in save]


def test_modules_beside_the_model_are_recorded(recorded: Records) -> None:
    modules = [module for step in recorded["step"] for module in step["beside"]]
    assert len({module for module in modules if module.startswith("AveragedModel:")}) == 4


def test_files_have_contents_under_their_last_name(recorded: Records) -> None:
    assert {file["path"]: file["step"] for file in recorded["file"]} == {"best.pt": 4, "last.pt": 4}
    assert len({file["content"] for file in recorded["file"]}) == 1  # the same weights
    (load,) = recorded["load"]
    assert load["path"].endswith("copy/last.pt")


def test_batch_of_a_teacher_is_that_of_the_step(tmp_path: Path) -> None:
    recorder = build_recorder(tmp_path)
    model = nn.Linear(2, 2)
    recorder._note_call(model, (torch.ones(1, 2),), {})
    recorder._data.take()
    recorder._data._unused[3] = 73
    with torch.no_grad():
        recorder._note_call(model, (torch.ones(1, 2),), {})
    recorder._note_call(model, (torch.ones(1, 2),), {})
    assert recorder._data.take() == Batches([73], [3])


def test_validation_by_an_average_in_training_mode_is_no_training_data(tmp_path: Path) -> None:
    """As of an AveragedModel without eval(): the last batch does not count for the next step."""
    recorder = build_recorder(tmp_path)
    model = nn.Linear(2, 2)
    recorder._note_call(model, (torch.ones(1, 2),), {})
    recorder._data.take()
    recorder._data._unused[4] = 74
    with torch.no_grad():
        recorder._note_call(nn.Linear(2, 2), (torch.ones(1, 2),), {})
    recorder._data._unused[3] = 73

    recorder._note_call(model, (torch.ones(1, 2),), {})

    assert recorder._data.take() == Batches([73], [3])


def test_models_with_equal_names_have_gradients_of_their_own(records: Records) -> None:
    gradients = records["step"][-1]["gradients"]
    assert len(gradients) == 2
    assert gradients[0] != gradients[1]


def test_parameters_of_no_module_are_a_model(tmp_path: Path) -> None:
    *_, model = run_script(tmp_path, "recorded_parameters.py")["model"]
    assert model["names"] == ["parameter 0", "parameter 1"]
    assert "built" not in model
    assert "recorded_parameters.py" in model["place"]


def test_layer_that_is_built_after_the_wrapper_is_not_shared(tmp_path: Path) -> None:
    (model,) = run_script(tmp_path, "recorded_replacement.py")["model"]
    assert model["unshared"] == ["1.weight", "1.bias"]
    assert "wrapper" not in model


def test_module_that_is_called_beside_its_wrapper_has_the_line_of_the_wrapper(records: Records) -> None:
    first, second = records["model"][:2]
    assert "recorded_models.py" in first["bypassed"]
    assert "bypassed" not in second


def test_shallow_copies_of_weights_are_references(records: Records) -> None:
    taken = {Path(save["path"]).stem: save["taken"] for save in records["save"] if "taken" in save}
    assert taken == dict.fromkeys(("copy", "cpu", "list", "shallow", "whole"), 1)
    assert [save["takenName"] for save in records["save"] if "takenName" in save] == ["kept"]


def test_module_that_is_given_its_own_weights_is_recorded(records: Records) -> None:
    (restore,) = records["restore"]
    assert (restore["taken"], restore["step"]) == (1, 3)


def test_modules_have_their_lines_and_those_after_the_optimizer_are_late(recorded: Records) -> None:
    (model,) = recorded["model"]
    assert [entry.partition(" ")[0] for entry in model["modules"]] == ["", "body", "head", "dropout"]
    assert model["late"] == ["head"]


def test_order_of_the_optimizer_is_recorded_at_the_first_step(records: Records) -> None:
    assert [step.get("optimized") for step in records["step"]] == [["weight", "weight"], None, None]


def test_call_of_shards_that_do_not_share_gradients_is_unsynchronized(tmp_path: Path) -> None:
    class FSDPModule(nn.Linear):
        pass

    recorder = build_recorder(tmp_path)
    model = nn.Sequential(FSDPModule(2, 2))
    for shares in (False, True):
        recorder._note_sharing(model, shares)
        recorder._note_call(model, (torch.ones(1, 2),), {})
        assert recorder._unsynchronized is not shares


def test_loader_of_which_the_script_keeps_the_iterator_has_a_length(records: Records) -> None:
    assert [loader["batches"] for loader in records["loader"]] == [3]


@pytest.mark.parametrize(("has_failed", "reason"), [(False, COMPLETED), (True, ERROR)])
def test_end_has_the_exit_code_by_the_error_file_of_the_rank(tmp_path: Path, has_failed: bool, reason: str) -> None:
    write_json(str(tmp_path / ORDER_FILE), to_json(RecordingOrder()))
    error = tmp_path / "error.json"
    recorder = Recorder(str(tmp_path), 0, 1, GroupRecorder(str(tmp_path), 0), str(error))
    if has_failed:
        error.touch()
    recorder._note_end()
    (end,) = [record for record in recorder._waiting if record["event"] == END]
    assert end["reason"] == reason


def test_process_without_a_step_records_what_it_has_read(tmp_path: Path) -> None:
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "state.json").touch()
    write_json(str(tmp_path / ORDER_FILE), to_json(RecordingOrder(folder=str(tmp_path / "copy"))))
    recorder = Recorder(str(tmp_path), 0, 1, GroupRecorder(str(tmp_path), 0))
    for path, mode in (("copy/state.json", "rb"), ("copy/log.txt", "w"), ("elsewhere.json", "r")):
        recorder._note_open("open", (str(tmp_path / path), mode, 0))
    recorder._note_idle()
    record = json.loads((tmp_path / f"0.{IDLE_SUFFIX}").read_text())
    assert record == {"isCut": False, "opened": ["state.json"]}
