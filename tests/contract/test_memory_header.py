"""The header of a copy in memory: scripts write it, and the launcher, which imports nothing of theirs, reads it."""

from pathlib import Path

import pytest

from ddp_pod.features.memory import copies as memory
from ddp_sdk.memory import copies
from ddp_sdk.memory.copies import REPLICATED, SHARD, CopyFile, Header


@pytest.mark.parametrize("kind", [REPLICATED, SHARD])
def test_every_field_of_a_header_has_the_same_meaning_on_both_sides(tmp_path: Path, kind: int) -> None:
    tmp_path.chmod(0o700)
    file = CopyFile(str(tmp_path / "own"))
    file.reserve(96)
    written = Header(kind, 2, 3, 1, payload=64, manifest=32, checksum=2**63 + 7, time=8.5, saves=9, stalled=10.25)
    file.commit(written)
    (read,) = memory.list_copies(str(tmp_path))
    names = ("kind", "step", "world", "rank", "time", "saves", "stalled")
    assert {name: getattr(read, name) for name in names} == {name: getattr(written, name) for name in names}
    assert read.size == copies.HEADER_BYTES + written.size


def test_parts_of_the_format_are_equal() -> None:
    for name in ("HEADER_BYTES", "_MAGIC", "_UNDER_WAY"):
        assert getattr(memory, name) == getattr(copies, name), name
    for name in ("_FIELDS", "_CRC", "_WRITER"):
        assert getattr(memory, name).format == getattr(copies, name).format, name
