"""Record the checkpoints that a script writes, and keep it from overwriting files outside of the checked folder."""

import io
import os
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

from ...rank.hooks import ImportHook, observe
from ...rank.tracebacks import find_call
from .contract import ORDER_FILE, SaveRecord
from .sink import Records

_SUFFIXES = (".pt", ".pth", ".ckpt", ".bin", ".pkl", ".pickle", ".npz", ".tar", ".safetensors", ".distcp", ".model")
_MOST_PATHS = 10_000
_PATHS = (pathlib.PosixPath, pathlib.WindowsPath)
_FILES = (io.BufferedWriter, io.BufferedRandom, io.FileIO)


class SaveHook:
    """Records files that PyTorch or safetensors writes, and others that have the suffix of a checkpoint."""

    def __init__(self, recorder: Records, folder: str) -> None:
        self._recorder = recorder
        self._order = os.path.join(folder, ORDER_FILE)
        self._paths: set[str] = set()

    def start(self, torch: Any) -> None:
        """Hook PyTorch, which opens the files of torch.save in C++, and the files that Python opens."""
        serialization = torch.serialization
        for name in ("_open_zipfile_writer", "_open_file_like"):
            setattr(serialization, name, self._wrap(getattr(serialization, name)))
        _SafetensorsHook(self._wrap).start()
        sys.addaudithook(self._audit)

    def _wrap(self, original: Callable[..., Any], place: int = 0) -> Callable[..., Any]:
        """Wrap a function that writes. ``place``: of the file or its path among its arguments."""

        def note(*arguments: Any, **options: Any) -> None:
            path = _find_path(arguments[place]) if len(arguments) > place else ""
            is_reading = len(arguments) > 1 and type(arguments[1]) is str and arguments[1].startswith("r")
            if path and not is_reading:
                self._note(path)

        return observe(original, before=note)

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Observe ``open`` and ``os.rename`` of this process."""
        if not self._recorder.is_active or event not in ("open", "os.rename"):
            return
        first, second = arguments[:2]
        if event == "os.rename":
            if not (type(first) is str and type(second) is str):
                return
            if second.endswith(_SUFFIXES) or os.path.realpath(first) in self._paths:
                self._note(second)
        elif type(first) is str and type(second) is str and first.endswith(_SUFFIXES) and set(second) & set("wxa"):
            self._note(first)

    def _note(self, path: str) -> None:
        """Record a save. Raises: PermissionError if it would overwrite a file that is not of this run."""
        if not self._recorder.is_active:
            return
        real = os.path.realpath(path)
        self._refuse_foreign(real)
        if len(self._paths) < _MOST_PATHS:
            self._paths.add(real)
        self._recorder.write(
            SaveRecord(time=time.time(), path=real, place=find_call().place, step=self._recorder.steps)
        )

    def _refuse_foreign(self, path: str) -> None:
        folder = self._recorder.order.folder
        if not folder or path.startswith(os.path.join(os.path.realpath(folder), "")) or not os.path.isfile(path):
            return
        if os.stat(path).st_mtime < os.stat(self._order).st_mtime:
            raise PermissionError(
                f"ddp check: {path} is outside of the checked folder and would be overwritten; pass another path to "
                "the script"
            )


def _find_path(target: Any) -> str:
    """Return the path of a file that is a path or was opened by Python; empty for any other object of the script."""
    if type(target) is str:
        return target
    if type(target) in _PATHS:
        return str(target)
    if type(target) in _FILES:
        return _find_path(target.name)
    return ""


class _SafetensorsHook(ImportHook):
    """Hooks safetensors, which writes files in Rust. ``wrap``: wraps a function that writes."""

    def __init__(self, wrap: Callable[[Callable[..., Any], int], Callable[..., Any]]) -> None:
        super().__init__("safetensors.torch")
        self._wrap = wrap

    def watch(self, module: Any) -> None:
        """Wrap the function."""
        module.save_file = self._wrap(module.save_file, 1)
