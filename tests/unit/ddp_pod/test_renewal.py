"""What a forked rank draws and notes again, and its output after a change of the files behind it."""

from __future__ import annotations

import io
import logging
import multiprocessing
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from ddp_pod.rank.worker import reopen_output
from ddp_pod.torchrun.renewal import renew_imported_state


def test_generators_of_loaded_modules_are_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    seeded: list[str] = []
    torch = SimpleNamespace(default_generator=SimpleNamespace(seed=lambda: seeded.append("torch")))
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "numpy.random", SimpleNamespace(seed=lambda: seeded.append("numpy")))
    monkeypatch.delitem(sys.modules, "sympy.core.random", raising=False)
    renew_imported_state()
    assert seeded == ["torch", "numpy"]
    assert "sympy.core.random" not in sys.modules


@pytest.mark.parametrize("began", [1.0, 1])
def test_values_of_an_import_are_renewed(monkeypatch: pytest.MonkeyPatch, began: float) -> None:
    for name in ("torch", "numpy.random", "sympy.core.random"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", "/of/the/server")
    monkeypatch.setattr(logging, "_startTime", began)
    monkeypatch.setattr(threading.main_thread(), "_native_id", 1)
    key = multiprocessing.current_process().authkey

    renew_imported_state()

    assert multiprocessing.current_process().authkey != key
    assert tempfile.tempdir is None
    start = vars(logging)["_startTime"]
    assert type(start) is type(began)
    assert start > (1e9 if isinstance(began, float) else 1e18), "seconds, or nanoseconds, since 1970"
    assert threading.main_thread().native_id == threading.get_native_id()


@contextmanager
def pipe_as_stdout() -> Iterator[int]:
    """Replace the file behind descriptor 1 by a pipe, and return the end to read from."""
    saved = os.dup(1)
    reader, writer = os.pipe()
    os.dup2(writer, 1)
    os.close(writer)
    try:
        yield reader
    finally:
        os.dup2(saved, 1)
        os.close(saved)
        os.close(reader)


def test_stdout_of_a_replaced_file_can_be_reconfigured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    raw = io.FileIO(tmp_path / "former", "wb")
    stream = io.TextIOWrapper(raw, "ascii", "backslashreplace", "\n", write_through=True)
    assert stream.seekable()
    monkeypatch.setattr(sys, "__stdout__", stream)
    monkeypatch.setattr(sys, "__stderr__", None)

    with pipe_as_stdout() as reader:
        reopen_output()
        shown = (stream.encoding, stream.errors, stream.write_through, stream.seekable(), stream.name)
        stream.reconfigure(encoding="latin-1")
        stream.write("é\n")
        written = os.read(reader, 9)

    assert shown == ("ascii", "backslashreplace", True, False, raw.name)
    assert written == "é\n".encode("latin-1")
    raw.close()
