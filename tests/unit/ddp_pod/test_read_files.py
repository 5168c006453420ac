"""The file that failing code was reading, from real parsers, and what it is."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import torch

from ddp_pod.failures.rules import WorkerEnd
from ddp_pod.failures.worker_failure import complete_worker_end
from tests.support.rank_errors import examine

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\nsize 12345\n"
PAGE = b"\n<!DOCTYPE html>\n<html><body>404</body></html>"


def read_pickle(path: Path) -> object:
    with path.open("rb") as file:
        return pickle.load(file)


def read_json(path: Path) -> object:
    with path.open() as file:
        return json.load(file)


@pytest.mark.parametrize("read", [torch.load, numpy.load, read_pickle, read_json])
@pytest.mark.parametrize(
    ("content", "name", "remedy"), [(POINTER, "a Git LFS pointer", "git lfs pull"), (PAGE, "an HTML page", "web page")]
)
def test_file_of_another_kind_is_named_with_its_remedy(
    read: Callable[[Path], object], content: bytes, name: str, remedy: str, tmp_path: Path
) -> None:
    path = tmp_path / "weights.pt"
    path.write_bytes(content)

    failure = examine(lambda: read(path), tmp_path)

    assert f"(file {path}: {len(content)} bytes, {name})" in failure.message
    assert remedy in failure.remedy


def test_archive_without_its_end_is_named(tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    torch.save(torch.zeros(1000), path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])

    failure = examine(lambda: torch.load(path), tmp_path)

    assert f"{len(whole) - 100} bytes, an incomplete zip archive" in failure.message
    assert "incomplete" in failure.remedy


def test_empty_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.touch()

    failure = examine(lambda: read_json(path), tmp_path)

    assert "0 bytes, an empty file" in failure.message


def test_error_without_a_file_names_none(tmp_path: Path) -> None:
    failure = examine(lambda: json.loads("{"), tmp_path)

    assert "(file" not in failure.message


def test_file_open_for_writing_is_not_what_a_parser_read(tmp_path: Path) -> None:
    def parse() -> None:
        with (tmp_path / "log.txt").open("w"):
            pickle.loads(b"\x00")

    failure = examine(parse, tmp_path)

    assert "(file" not in failure.message


def test_records_of_a_former_launcher_are_read() -> None:
    link = {
        "types": ["KeyError"],
        "message": "'a'",
        "errno": None,
        "path": "",
        "place": "",
        "line": "",
        "handled": False,
    }

    end = complete_worker_end(WorkerEnd(1), {"type": "KeyError", "message": "'a'", "chain": [link]})

    assert end.chain[0].content == ""


def test_file_that_the_exception_of_a_helper_names_is_examined(tmp_path: Path) -> None:
    picture = tmp_path / "cat.jpg"
    head = (
        "Caught UnidentifiedImageError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n"
    )
    frame = (
        '  File "/lib/python3.11/site-packages/PIL/Image.py", line 7, in open\n    raise UnidentifiedImageError(msg)\n'
    )
    text = f"{head}{frame}PIL.UnidentifiedImageError: cannot identify image file '{picture}'\n"

    def fail() -> None:
        raise RuntimeError(text)

    picture.write_text("text of the user")
    assert "git lfs" not in examine(fail, tmp_path).remedy
    picture.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:44\nsize 12345\n")
    failure = examine(fail, tmp_path)
    assert "a Git LFS pointer" in failure.message
    assert "git lfs pull" in failure.remedy
