"""Record the checkpoints that a script writes, and keep it from overwriting files outside of the checked folder."""

import functools
import hashlib
import io
import os
import pathlib
import re
import sys
import time
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from ...rank.hooks import ImportHook, observe
from ...rank.script_objects import IdentityMap, is_instance, list_parameters, list_values, read_tensor
from ...rank.tracebacks import find_call
from .contract import ORDER_FILE, FileRecord, LoadRecord, RestoreRecord, SaveRecord
from .sink import Records

_SUFFIXES = (".pt", ".pth", ".ckpt", ".bin", ".pkl", ".pickle", ".npz", ".tar", ".safetensors", ".distcp", ".model")
_MOST_PATHS = 10_000
_MOST_STATES = 10_000  # objects that are searched in what is saved
_MOST_BYTES = 1 << 28  # of a file whose tensors are compared
_ENTRY = re.compile(r"/data/\d+$|\.npy$")
_RANDOM_STATES = (16, 5056)  # bytes of a generator's state, which a right script need not restore
_PATHS = (pathlib.PosixPath, pathlib.WindowsPath)
_FILES = (io.BufferedWriter, io.BufferedRandom, io.FileIO)


class _Kept(NamedTuple):
    """Weights that the script keeps: since which step, the line that took them, and a variable that has them."""

    step: int
    place: str
    name: str = ""


def _contain(method: Callable[..., None]) -> Callable[..., None]:
    """Keep an error of the recorder from the script: only the fact is missing."""

    @functools.wraps(method)
    def contained(self: "SaveHook", *arguments: Any, **options: Any) -> None:
        try:
            if self._recorder.is_active:
                method(self, *arguments, **options)
        except Exception:
            self._kept = None

    return contained


class SaveHook:
    """Records files that PyTorch or safetensors writes, and others that have the suffix of a checkpoint."""

    def __init__(self, recorder: Records, folder: str) -> None:
        self._recorder = recorder
        self._order = os.path.join(folder, ORDER_FILE)
        self._paths: set[str] = set()
        self._unread: dict[str, int] = {}  # saved files whose contents are not recorded, with the step of the save
        self._taken = IdentityMap()  # of tensors in a state_dict(): step and line of the call, and the model
        self._copies = IdentityMap()  # of modules: step and line of the copy, which may be a shallow one
        self._kept: _Kept | None = None  # in the value that is saved now

    def start(self, torch: Any) -> None:
        """Hook PyTorch, which opens the files of torch.save in C++, and the files that Python opens."""
        serialization = torch.serialization
        for name in ("_open_zipfile_writer", "_open_file_like"):
            setattr(serialization, name, self._wrap(getattr(serialization, name)))
        self._torch = torch
        module = torch.nn.Module
        module.state_dict = observe(module.state_dict, after=self._note_state)
        module.load_state_dict = observe(module.load_state_dict, before=self._note_restore)
        module.__setstate__ = observe(module.__setstate__, after=self._note_copy)
        torch.save = observe(torch.save, before=self._note_kept, after=self._forget_kept)
        _SafetensorsHook(self._wrap).start()
        sys.addaudithook(self._audit)

    def _wrap(self, original: Callable[..., Any], place: int = 0) -> Callable[..., Any]:
        """Wrap a function that writes. ``place``: of the file or its path among its arguments."""

        def note(*arguments: Any, **options: Any) -> None:
            path = _find_path(arguments[place]) if len(arguments) > place else ""
            is_reading = len(arguments) > 1 and type(arguments[1]) is str and arguments[1].startswith("r")
            if path and is_reading:
                self._note_load(path)
            elif path:
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
            self._unread[real] = self._recorder.steps
        kept = self._kept or _Kept(0, "")
        self._recorder.write(
            SaveRecord(
                time=time.time(),
                path=real,
                place=find_call().place,
                step=self._recorder.steps,
                taken=kept.step if self._kept else None,
                taken_place=kept.place,
                taken_name=kept.name,
            )
        )

    @_contain
    def _note_load(self, path: str) -> None:
        record = LoadRecord(path=os.path.realpath(path), place=find_call().place, step=self._recorder.steps)
        self._recorder.write(record)

    @_contain
    def _note_state(self, state: Any, module: Any, *arguments: Any, **options: Any) -> None:
        """Remember when a model's state was taken: its tensors are those of the model, which go on changing."""
        if not arguments and options.get("destination") is None:
            taken = (_Kept(self._recorder.steps, find_call().place), module)
            for tensor in list_values(state):
                if _find_memory(self._torch, tensor):
                    self._taken[tensor] = taken

    @_contain
    def _note_copy(self, _: None, module: Any, *arguments: Any, **options: Any) -> None:
        self._copies[module] = _Kept(self._recorder.steps, find_call().place)

    @_contain
    def _note_kept(self, value: Any, *arguments: Any, **options: Any) -> None:
        """Find weights in a value to save that were taken before an earlier step, and not copied."""
        self._kept = next(self._find_kept(value), (None,))[0]

    @_contain
    def _note_restore(self, module: Any, state: Any, *arguments: Any, **options: Any) -> None:
        """Record that a module is given its own weights, as if they were those of an earlier step."""
        kept = next((kept for kept, item in self._find_kept(state) if _has_memory(self._torch, item, [module])), None)
        if kept is not None:
            self._recorder.write(
                RestoreRecord(
                    place=find_call().place,
                    step=self._recorder.steps,
                    taken=kept.step,
                    taken_place=kept.place,
                    taken_name=kept.name,
                )
            )

    def _find_kept(self, value: Any) -> Iterator[tuple[_Kept, Any]]:
        """Yield the weights that were taken before an earlier step and not copied, each with a tensor of it."""
        waiting = [value]
        for _ in range(_MOST_STATES):
            if not waiting:
                return
            item = waiting.pop()
            if type(item) in (dict, OrderedDict, list, tuple):
                waiting += list_values(item)
                continue
            kept, modules = self._find_origin(item)
            tensor = item
            if is_instance(item, self._torch.nn.Module):
                tensor = next((parameter for _, parameter, _ in list_parameters(item)), None)
            if kept is not None and kept.step < self._recorder.steps and _has_memory(self._torch, tensor, modules):
                yield kept, tensor

    def _find_origin(self, item: Any) -> tuple[_Kept | None, list[Any]]:
        """Return since when the script keeps an item of a saved value, and the modules whose memory it then shares."""
        taken, module = self._taken.get(item, (None, item))
        if taken is not None and taken.step < self._recorder.steps:
            return taken, [module]
        copied = self._copies.get(module)
        if copied is None and type(item) is self._torch.Tensor:
            seen = self._recorder.find_view(item)
            copied = None if seen is None else _Kept(seen[0], "", seen[1])
        # What exists before the first step is no copy of an earlier one: it represents the weights.
        return (copied, self._recorder.models) if copied is not None and copied.step > 0 else (None, [])

    def _forget_kept(self, *_: Any, **options: Any) -> None:
        self._kept = None

    @_contain
    def write_files(self) -> None:
        """Record what the files have that were saved since the last call. Those that were renamed are gone."""
        unread = self._unread
        self._unread = {}
        for path, step in unread.items():
            content = digest_file(path)
            if content:
                folder = os.path.join(os.path.realpath(self._recorder.order.folder), "")
                name = path[len(folder) :] if path.startswith(folder) else path
                self._recorder.write(FileRecord(path=name, step=step, content=content))

    def _refuse_foreign(self, path: str) -> None:
        folder = self._recorder.order.folder
        if not folder or path.startswith(os.path.join(os.path.realpath(folder), "")) or not os.path.isfile(path):
            return
        if os.stat(path).st_mtime < os.stat(self._order).st_mtime:
            raise PermissionError(
                f"ddp check: {path} is outside of the checked folder and would be overwritten; pass another path to "
                "the script"
            )


def _has_memory(torch: Any, tensor: Any, modules: list[Any]) -> bool:
    """Return whether a tensor is in the memory of the parameters of modules."""
    place = _find_memory(torch, tensor)
    parameters = (item for module in modules for _, item, _ in list_parameters(module))
    return place != 0 and any(_find_memory(torch, item) == place for item in parameters)


def _find_memory(torch: Any, value: Any) -> int:
    tensor = read_tensor(torch, value)
    return 0 if tensor is None or not tensor.numel() else int(tensor.data_ptr())


def digest_file(path: str) -> str:
    """Return a digest of the tensors in a checkpoint; empty if it has none, is too large, or is being written.

    The bytes of the file would not do: pickle writes a text once if it is the same object again.
    """
    digest = hashlib.blake2b(digest_size=8)
    try:
        if os.path.getsize(path) > _MOST_BYTES:
            return ""
        with zipfile.ZipFile(path) as archive:
            entries = [entry for entry in archive.infolist() if _ENTRY.search(entry.filename)]
            for entry in sorted(entries, key=lambda entry: (len(entry.filename), entry.filename)):
                if entry.file_size not in _RANDOM_STATES:
                    digest.update(archive.read(entry))
    except (OSError, zipfile.BadZipFile, RuntimeError, ValueError):
        return ""
    return digest.hexdigest() if entries else ""


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
