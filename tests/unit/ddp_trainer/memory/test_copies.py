"""Files with copies."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ddp_trainer.memory import copies
from ddp_trainer.memory.copies import (
    REPLICATED,
    CopyFile,
    NoRoomError,
    build_header,
    compute_checksum,
    decode_header,
    encode_header,
)


def write(file: CopyFile, step: int, content: torch.Tensor) -> None:
    memory = file.reserve(content.numel())
    memory.copy_(content)
    file.commit(build_header(REPLICATED, step, world=2, rank=0, payload=content.numel(), memory=memory))


CONTENT = (torch.arange(600_001) % 251).to(torch.uint8)


def test_copy_survives_the_writer(tmp_path: Path) -> None:
    path = str(tmp_path / "state-0")
    write(CopyFile(path), 7, CONTENT)
    reader = CopyFile(path)
    header = reader.header
    assert header is not None
    assert (header.step, header.world, header.size) == (7, 2, CONTENT.numel())
    assert reader.verify()
    assert torch.equal(reader.open(), CONTENT)


def test_file_without_commit_contains_no_copy(tmp_path: Path) -> None:
    file = CopyFile(str(tmp_path / "state-0"))
    write(file, 7, CONTENT)
    file.reserve(CONTENT.numel()).copy_(CONTENT)
    assert CopyFile(file.path).header is None
    assert file.header is None


@pytest.mark.parametrize("position", [0, 262_144, 600_000], ids=["first", "second chunk", "odd tail"])
def test_changed_byte_is_detected(tmp_path: Path, position: int) -> None:
    file = CopyFile(str(tmp_path / "state-0"))
    write(file, 7, CONTENT)
    file.open()[position] ^= 1
    assert not CopyFile(file.path).verify()


def test_exchanged_chunks_are_detected() -> None:
    chunk = 8 << 15
    memory = torch.zeros(2 * chunk, dtype=torch.uint8)
    memory[:chunk] = 1
    assert compute_checksum(memory) != compute_checksum(memory.flip(0))


def test_header_with_a_changed_bit_is_invalid() -> None:
    encoded = bytearray(encode_header(copies.Header(REPLICATED, 7, 2, 0, 10, 20, 30, 1.5)))
    assert decode_header(bytes(encoded)) is not None
    encoded[9] ^= 1
    assert decode_header(bytes(encoded)) is None


def test_truncated_file_contains_no_copy(tmp_path: Path) -> None:
    file = CopyFile(str(tmp_path / "state-0"))
    write(file, 7, CONTENT)
    with open(file.path, "r+b") as raw:
        raw.truncate(5000)
    assert CopyFile(file.path).header is None


def test_larger_state_gets_another_allocation(tmp_path: Path) -> None:
    file = CopyFile(str(tmp_path / "state-0"))
    write(file, 7, CONTENT[:1000])
    write(file, 8, CONTENT)
    assert CopyFile(file.path).verify()


def test_full_memory_is_an_error_before_the_first_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "find_available", lambda folder: 1000)
    file = CopyFile(str(tmp_path / "state-0"))
    with pytest.raises(NoRoomError):
        file.reserve(CONTENT.numel())
    assert file.allocated == 0
