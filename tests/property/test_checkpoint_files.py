"""Damaged checkpoint folders: the trainer resumes from a complete checkpoint or none, and never raises."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ddp_sdk.errors import UserError
from ddp_sdk.rank_env import RankEnv
from ddp_trainer.checkpoint import CheckpointConfig
from ddp_trainer.checkpoint.store import Checkpointer, load_newest
from ddp_trainer.distributed.world import World
from tests.support.fuzzing import examples, tally
from tests.support.strategies import INTERESTING, mutate, places
from tests.support.strategies import json as any_json

WORLD = World(RankEnv(), torch.device("cpu"))
STEPS = (1, 2, 3)


def checkpointer(folder: Path) -> Checkpointer:
    return Checkpointer(CheckpointConfig(dir=str(folder), keep=3))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three checkpoints, whose files are damaged in copies."""
    path = tmp_path_factory.mktemp("checkpoints")
    store = checkpointer(path)
    store.prepare()
    for step in STEPS:
        store.save({"weights": torch.full((64,), float(step))}, step, 0.5 + step / 10, {"preset": "digits"})
        store.wait()
    return path


@st.composite
def damages(draw: st.DrawFn) -> tuple[str, int, str, Any]:
    """Return which file of which step is damaged, and how."""
    kind = draw(st.sampled_from(["flip", "cut", "add", "zero", "garbage", "nest", "remove", "say"]))
    file = "json" if kind == "say" else draw(st.sampled_from(["pt", "json"]))
    detail = {
        "flip": st.integers(0, 10**9),
        "cut": st.integers(0, 10**9),
        "zero": st.integers(0, 10**9),
        "add": st.binary(min_size=1, max_size=20),
        "garbage": st.binary(max_size=40) | any_json.map(json.dumps).map(str.encode),
        "nest": st.integers(1, 100_000),
        "say": st.tuples(st.integers(0, 100), st.sampled_from(INTERESTING) | any_json | st.just("../other.pt"),
                         st.sampled_from(["replace", "remove", "misspell"])),
        "remove": st.none(),
    }[kind]  # fmt: skip
    return file, draw(st.sampled_from(STEPS)), kind, draw(detail)


def damage(path: Path, kind: str, detail: Any) -> None:
    if not path.exists():
        return
    data = bytearray(path.read_bytes())
    if kind == "flip" and data:
        data[detail // 8 % len(data)] ^= 1 << detail % 8
    elif kind == "cut" and data:
        del data[detail % len(data) :]
    elif kind == "zero" and data:
        start = detail % len(data)
        data[start : start + 512] = bytes(len(data[start : start + 512]))
    elif kind == "add":
        data += detail
    elif kind == "garbage":
        data = bytearray(detail)
    elif kind == "nest":
        data = bytearray(b"[" * detail)
    elif kind == "say":
        with contextlib.suppress(ValueError, RecursionError):
            manifest = json.loads(data)
            number, new, how = detail
            result = places(manifest) if isinstance(manifest, dict) else []
            if result:
                data = bytearray(json.dumps(mutate(manifest, result[number % len(result)], new, how)).encode())
    elif kind == "remove":
        path.unlink()
        return
    path.write_bytes(data)


@examples(150)
@given(found=st.lists(damages(), min_size=1, max_size=4))
def test_resumed_checkpoint_is_complete(folder: Path, found: list[tuple[str, int, str, Any]]) -> None:
    whole = {step: (folder / f"step-{step:09d}.pt").read_bytes() for step in STEPS}
    copy = folder.parent / "damaged"
    shutil.copytree(folder, copy)
    try:
        for file, step, kind, detail in found:
            damage(copy / f"step-{step:09d}.{file}", kind, detail)
        message = io.StringIO()
        with contextlib.redirect_stderr(message):
            data = checkpointer(copy).read_newest()
        untouched = max(set(STEPS) - {step for _, step, _, _ in found}, default=0)
        assert data is None or data in whole.values()
        if data is None:
            assert untouched == 0
        else:
            (step,) = (step for step, content in whole.items() if content == data)
            assert step >= untouched
            for newer in range(step + 1, STEPS[-1] + 1):
                gone = not (copy / f"step-{newer:09d}.json").exists()
                assert gone or f"step-{newer:09d}" in message.getvalue(), "skipped without a word"
        # The rest of them does not prevent the next save, and files outside the folder are unchanged.
        with contextlib.redirect_stderr(message):
            store = checkpointer(copy)
            store.save({"weights": torch.zeros(1)}, 4, None, {})
            store.wait()
            assert load_newest(store, WORLD) is not None
        assert "not saved" not in message.getvalue()
    finally:
        shutil.rmtree(copy)
    tally("checkpoint damaged")


@examples(60)
@given(content=st.binary(max_size=60) | st.tuples(st.integers(0, 10**9), st.integers(0, 255)))
def test_foreign_file_is_refused_in_one_sentence(folder: Path, content: Any) -> None:
    """Its checksum is valid: a person has stored it."""
    data = content
    if isinstance(content, tuple):
        place, byte = content
        changed = bytearray((folder / "step-000000003.pt").read_bytes())
        changed[place % len(changed)] = byte
        data = bytes(changed)

    class Folder(Checkpointer):
        def read_newest(self) -> bytes | None:
            return bytes(data)

    with contextlib.suppress(UserError):
        load_newest(Folder(CheckpointConfig(dir=str(folder))), WORLD)
    tally("checkpoint forged")
