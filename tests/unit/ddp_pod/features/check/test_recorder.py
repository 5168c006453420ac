"""Which batches belong to a step."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from ddp_pod.base.files import write_json
from ddp_pod.contract.records import to_json
from ddp_pod.features.check.contract import ORDER_FILE, Order
from ddp_pod.features.check.recorded_data import Batches
from ddp_pod.features.check.recorder import Recorder
from ddp_pod.rank.groups import GroupRecorder


def build_recorder(folder: Path) -> Recorder:
    write_json(str(folder / ORDER_FILE), to_json(Order()))
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
