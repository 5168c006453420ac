"""Which files of a script are checkpoints."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from ddp_pod.features.check.contract import RecordingOrder
from ddp_pod.features.check.recorded_saves import SaveHook


@pytest.mark.parametrize(
    ("events", "saved"),
    [
        ([("open", ("last.pt", "wb"))], ["last.pt"]),
        ([("open", ("last.pt", "rb")), ("open", ("log.txt", "w"))], []),
        ([("open", ("a.ckpt", "wb")), ("os.rename", ("a.ckpt", "final"))], ["a.ckpt", "final"]),
        ([("open", (".tmp-1", "wb")), ("os.rename", (".tmp-1", "step-4.pt"))], ["step-4.pt"]),
        ([("os.rename", ("log.tmp", "log.txt")), ("os.rename", (b"a", b"b.pt"))], []),
    ],
)
def test_save_is_a_file_with_the_suffix_of_a_checkpoint_or_its_later_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, events: list[tuple[str, tuple[object, ...]]], saved: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    records: list[str] = []
    recorder = SimpleNamespace(
        is_active=True, order=RecordingOrder(), steps=4, write=lambda record: records.append(Path(record.path).name)
    )
    hook = SaveHook(recorder, str(tmp_path))  # type: ignore[arg-type]
    for event, arguments in events:
        hook._audit(event, (*arguments, 0))
    assert records == saved
