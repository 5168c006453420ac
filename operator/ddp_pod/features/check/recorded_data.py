"""Record the DataLoaders of a script, and end their iterations early."""

import dis
import functools
import gc
import itertools
import math
import os
import sys
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

from ...base.files import read_json, write_json
from ...rank import fingerprint
from ...rank.hooks import ImportHook, observe
from ...rank.script_objects import (
    IdentityMap,
    find_function,
    find_member,
    is_instance,
    is_of_package,
    list_names,
    list_values,
    read_attributes,
    read_tensor,
)
from ...rank.tracebacks import find_call
from .contract import LENGTH_SUFFIX, MOST_UNEVEN, LoaderRecord
from .sink import Indices, Records

_MODULE = "torch.utils.data.dataloader"
_SAMPLERS = ("torch.utils.data.distributed", "torch.utils.data.sampler")
_MOST_INDICES = 1 << 16  # of a batch
_NEVER = object()  # unlike any digest


class Batches(NamedTuple):
    """What the DataLoaders have delivered for one step: the digests of indices, and the numbers of the loaders."""

    indices: list[int]
    loaders: list[int]


class _Loader:
    """A DataLoader of the script.

    ``number``: in the order in which they were built; ``skipped``: batches at the beginning of an epoch that it leaves
    out, as accelerate does after a resume; ``find``: returns the DataLoader.
    """

    def __init__(self, number: int, built: str, skipped: int = 0, find: Callable[[], Any] = lambda: None) -> None:
        self.number = number
        self.built = built
        self.skipped = skipped
        self.find = find
        self.iterations = 0
        self.is_stream = False
        self.has_end = True  # whether its sampler can be counted; that of a stream cannot
        self.key = ""  # which its peers on other ranks have too
        self.length: int | None = None
        self.extra: int | None = None  # batches that the shortest cut epoch of a peer does not have; None: not known


class _Iteration:
    """One iteration of a DataLoader. ``indices``: digests of the batches that were requested and not delivered.

    ``record``: of its beginning, until PyTorch has read how much data there is; ``last``: the last index so far.
    """

    def __init__(self, loader: _Loader, record: LoaderRecord | None = None) -> None:
        self.loader = loader
        self.record = record
        self.number = loader.iterations
        self.delivered = 0
        self.indices: deque[Indices] = deque()
        self.last = -math.inf


class _SamplerHook(ImportHook):
    """Notes where the script builds each DistributedSampler."""

    def __init__(self) -> None:
        super().__init__("torch.utils.data.distributed")
        self._places = IdentityMap()

    def watch(self, module: Any) -> None:
        """Wrap the constructor."""
        kind = module.DistributedSampler
        kind.__init__ = observe(kind.__init__, after=self._note_place)

    def _note_place(self, _: None, sampler: Any, *arguments: Any, **options: Any) -> None:
        self._places[sampler] = find_call().place

    def find_place(self, sampler: Any) -> str:
        """Return the line that built a sampler; empty if it is unknown."""
        return "" if sampler is None else self._places.get(sampler, "")


class _SizeHook(ImportHook):
    """Notes the sizes that a module of PyTorch reads: to read one again would call a method of the script."""

    def __init__(self, module: str, sizes: IdentityMap) -> None:
        super().__init__(module)
        self._sizes = sizes

    def watch(self, module: Any) -> None:
        """Replace the function ``len`` in the module."""
        sizes = self._sizes

        def measure(value: Any) -> int:
            size = len(value)
            try:
                sizes[value] = size
            except TypeError:
                pass  # a list or another object that has no weak references
            return size

        module.len = measure


def _find_size(sizes: IdentityMap, value: Any) -> int | None:
    """Return the size of a dataset or a sampler; None if PyTorch has not read it.

    ``sizes``: what PyTorch has read; its own samplers are calculated from it.
    """
    size = sizes.get(value)
    if size is not None:
        return int(size)
    if type(value) in (list, tuple, range, dict):
        return len(value)
    function = find_function(type(value), "__len__")
    if function is None or not str(function.__module__).startswith("torch.utils.data."):
        return None
    attributes = read_attributes(value)
    for name in ("num_samples", "_num_samples"):
        if type(attributes.get(name)) is int:
            return int(attributes[name])
    if "batch_size" in attributes:
        samples = _find_size(sizes, attributes.get("sampler"))
        return None if samples is None else _count_batches(samples, attributes)
    data = [attributes[name] for name in ("data_source", "indices") if name in attributes]
    return _find_size(sizes, data[0]) if data else None


def _count_batches(samples: int, batch_sampler: dict[str, Any]) -> int | None:
    size = batch_sampler["batch_size"]
    if type(size) is not int or size < 1:
        return None
    return samples // size if batch_sampler.get("drop_last") is True else -(-samples // size)


def _write_indices(index: Any) -> str:
    """Return what a batch consists of as text; empty if it is unknown, as that of an IterableDataset."""
    parts: list[str] = []
    waiting = [index]
    while waiting:
        value = waiting.pop()
        if len(parts) + len(waiting) > _MOST_INDICES:
            return ""
        if type(value) in (int, float, bool, str):
            parts.append(str(value))
            continue
        tensor = read_tensor(sys.modules["torch"], value)
        if tensor is not None or is_of_package(value, "numpy"):
            waiting.append((value if tensor is None else tensor).tolist())
            continue
        values = list_values(value)
        if not values:
            return ""
        parts.append(f"({len(values)}")
        waiting += reversed(values)
    return " ".join(parts)


def _read_numbers(text: str) -> Iterator[float]:
    """Yield the indices in a text of `_write_indices` that are numbers."""
    for part in text.split():
        try:
            yield float(part)
        except ValueError:
            pass


def _list_numbers(name: str, part: Any) -> list[str]:
    """Return the integers that an object has as attributes, such as dataset.epoch=1."""
    return [f"{name}.{key}={value}" for key, value in read_attributes(part).items() if type(value) is int]


def _is_countable(loader: dict[str, Any]) -> bool:
    """Return whether the samplers of a DataLoader define a length: one without may be endless."""
    samplers = [loader.get("sampler"), loader.get("batch_sampler")]
    samplers.append(read_attributes(samplers[1]).get("sampler"))
    return all(find_member(type(item), "__len__") is not None for item in samplers if item is not None)


def _calls_next(frame: Any) -> bool:
    """Return whether a frame calls a function, as ``next(batches)``: a loop has another instruction."""
    instruction: str = dis.opname[frame.f_code.co_code[frame.f_lasti]]
    return instruction.startswith("CALL")


def _is_in_cycle(item: Any, memory: frozenset[int]) -> bool:
    """Return whether an object is an ``itertools.cycle`` that keeps a batch with these tensors."""
    if type(item) is not itertools.cycle:
        return False
    return any(_list_memory(part) & memory for part in gc.get_referents(item) if type(part) is list)


def _list_memory(batch: Any) -> frozenset[int]:
    """Return where the tensors in a batch are in memory."""
    tensors = fingerprint.find_tensors(sys.modules["torch"], batch)
    return frozenset(tensor.data_ptr() for tensor in tensors if tensor.numel())


_UNKNOWN = _Loader(-1, "")  # until the loader's iteration begins


class DataHook(ImportHook):
    """Hooks PyTorch's DataLoader once it is imported."""

    def __init__(self, recorder: Records, folder: str) -> None:
        """``folder``: of the records, which all ranks have."""
        super().__init__(_MODULE)
        self._recorder = recorder
        self._folder = folder
        self._loaders = IdentityMap()  # records of type _Loader
        self._iterations = IdentityMap()  # records of type _Iteration, by iterator
        self._samplers = _SamplerHook()
        self._sizes = IdentityMap()
        self._kind: type = object  # of the iterators
        self._count = 0
        self._turns: Counter[str] = Counter()  # DataLoaders by the line that builds them
        self._batches = Batches([], [])
        self.has_cut = False  # whether an iteration was ended early
        self._unused: dict[int, int | None] = {}  # by loader: the last batch's indices
        self._aside: dict[int, int | None] = {}  # what a call without gradients has used
        self._delivered: frozenset[int] = frozenset()  # where the tensors of the last batch are in memory
        self._is_cycled: bool | None = None  # whether an itertools.cycle has these; None: not known

    def start(self) -> None:
        """Watch for the imports."""
        self._samplers.start()
        for module in (*_SAMPLERS, _MODULE):
            _SizeHook(module, self._sizes).start()
        super().start()

    def use(self) -> None:
        """Note that a model is called: of each loader, with the last batch. Those before are skipped after a resume."""
        for loader, indices in (self._unused or self._aside).items():
            self._batches.loaders.append(loader)
            if indices is not None:
                self._batches.indices.append(indices)
        self._unused.clear()
        self._aside.clear()

    def set_aside(self) -> None:
        """Note a call without gradients: a validation, unless a call with gradients follows for the same batches."""
        if self._unused:
            self._aside = self._unused
            self._unused = {}

    def discard(self, unused: dict[int, int | None] | None = None) -> None:
        """Note that a model is evaluated: with the batches since the last call of a model, or with ``unused``."""
        for loader, indices in list(self._unused.items()):
            if unused is None or unused.get(loader, _NEVER) == indices:
                del self._unused[loader]

    def get_unused(self) -> dict[int, int | None]:
        """Return the last batch of each loader since the last call of a model."""
        return dict(self._unused)

    def take(self) -> Batches:
        """Return what the models were called with since the last call."""
        self._aside.clear()
        self.use()
        batches = self._batches
        self._batches = Batches([], [])
        return batches

    def is_cycled(self, batches: Batches) -> bool:
        """Return whether the batch of a step is one that an ``itertools.cycle`` has kept of a DataLoader."""
        if batches.loaders or not self._delivered:
            return False
        if self._is_cycled is None:
            self._is_cycled = any(_is_in_cycle(item, self._delivered) for item in gc.get_objects())
        return self._is_cycled

    def watch(self, module: Any) -> None:
        """Hook the loader and its iterator."""
        loader = module.DataLoader
        iterator = module._BaseDataLoaderIter
        self._kind = iterator
        loader.__init__ = observe(loader.__init__, after=self._note_loader)
        loader.__iter__ = self._wrap_iteration(loader.__iter__)
        loader.__len__ = self._wrap_length(loader.__len__)
        iterator._reset = observe(iterator._reset, before=self._forget)
        iterator._next_index = observe(iterator._next_index, after=self._note_request)
        iterator.__next__ = self._wrap_delivery(iterator.__next__)

    def _note_loader(self, _: None, loader: Any, *arguments: Any, **options: Any) -> None:
        if self._recorder.is_active and self._loaders.get(loader) is None:
            skipped = read_attributes(read_attributes(loader).get("batch_sampler")).get("skip_batches")
            skipped = skipped if type(skipped) is int else 0
            found = _Loader(self._count, find_call().place, skipped, weakref.ref(loader))
            self._turns[found.built] += 1
            found.key = f"{fingerprint.hash_text(f'{found.built} {self._turns[found.built]}') & fingerprint.MASK:x}"
            self._loaders[loader] = found
            self._count += 1

    def _wrap_iteration(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        @functools.wraps(original)
        def iterate(loader: Any) -> Any:
            found = self._loaders.get(loader)
            record = self._build_record(loader, found) if found is not None and self._recorder.is_active else None
            self._recorder.enter_data()
            try:
                iterator = original(loader)
            finally:
                self._recorder.leave_data()
            if found is not None and is_instance(iterator, self._kind):
                self._begin(iterator, found, record)
            return iterator

        return iterate

    def _begin(self, iterator: Any, loader: _Loader, record: LoaderRecord | None) -> None:
        """Count from 0 again. Workers have requested batches before: their iterator was reset."""
        iteration = _Iteration(loader, record)
        former = self._iterations.get(iterator)
        if former is not None and former.loader is _UNKNOWN:
            iteration.indices = former.indices
            iteration.last = former.last
        self._iterations[iterator] = iteration

    def _forget(self, iterator: Any, *arguments: Any, **options: Any) -> None:
        """Forget what the workers of a former iteration have prefetched."""
        self._iterations[iterator] = _Iteration(_UNKNOWN)

    def _build_record(self, loader: Any, found: _Loader) -> LoaderRecord:
        found.iterations += 1
        attributes = read_attributes(loader)
        parts = [(name, attributes.get(name)) for name in ("sampler", "batch_sampler", "dataset")]
        parts.append(("batch_sampler.sampler", read_attributes(attributes.get("batch_sampler")).get("sampler")))
        samplers = (attributes.get("sampler"), read_attributes(attributes.get("batch_sampler")).get("sampler"))
        found.is_stream = "IterableDataset" in list_names(type(attributes.get("dataset")))
        found.has_end = not found.is_stream and _is_countable(attributes)
        distributed = next((item for item in samplers if find_member(type(item), "set_epoch") is not None), None)
        state = read_attributes(distributed)
        epoch = state.get("epoch") if type(state.get("epoch")) is int else 0
        return LoaderRecord(
            time=time.time(),
            loader=found.number,
            iteration=found.iterations,
            built=found.built,
            place=find_call().place,
            sampler_built=self._samplers.find_place(distributed),
            shuffles=None if distributed is None else state.get("shuffle") is True,
            epoch=None if distributed is None else epoch,
            setter=next((name for name, part in parts if find_member(type(part), "set_epoch") is not None), ""),
            state=tuple(text for name, part in parts for text in _list_numbers(name, part)),
            workers=attributes["num_workers"] if type(attributes.get("num_workers")) is int else 0,
            is_stream=found.is_stream,
        )

    def _write_record(self, iteration: _Iteration, iterator: Any) -> None:
        """Write the record of an iteration that has begun: now PyTorch has read the sizes, or never does."""
        if iteration.record is not None:
            batches = self._find_length(iteration.loader.find())
            if batches is None:  # the script keeps the iterator alone
                sampler = read_attributes(iterator).get("_index_sampler")
                batches = None if iteration.record.is_stream else _find_size(self._sizes, sampler)
            self._recorder.write(replace(iteration.record, batches=batches))
            iteration.record = None
            if batches is not None and iteration.loader.length is None:
                iteration.loader.length = batches
                name = f"{self._recorder.rank}.{iteration.loader.key}.{LENGTH_SUFFIX}"
                with suppress(OSError):
                    write_json(os.path.join(self._folder, name), {"batches": batches})

    def _find_limit(self, loader: _Loader) -> int | None:
        """Return after how many batches an iteration ends; None: it is not cut."""
        most = self._recorder.order.batches
        if not most or not self._recorder.is_active:
            return None
        return max(0, most - loader.skipped) + (loader.extra or 0)

    def _compare_lengths(self, loader: _Loader) -> int:
        """Return how many batches more an epoch has than the shortest one of a peer, so that a cut does not hide it.

        Ranks share gradients, so that all have begun the epoch that one of them is about to end.
        """
        end = f".{loader.key}.{LENGTH_SUFFIX}"
        lengths = [loader.length or 0]
        with suppress(OSError):
            names = [name for name in os.listdir(self._folder) if name.endswith(end)]
            values = [read_json(os.path.join(self._folder, name)).get("batches") for name in names]
            lengths += [value for value in values if type(value) is int]
        return min(MOST_UNEVEN, lengths[0] - min(lengths)) if loader.length is not None else 0

    def _find_length(self, loader: Any) -> int | None:
        """Return the batches of a DataLoader; None if it has no length, or a sampler of the script alone knows it."""
        length = self._sizes.get(loader)
        if length is not None:
            return int(length)
        attributes = read_attributes(loader)
        batch_sampler = attributes.get("batch_sampler")
        return _find_size(self._sizes, attributes.get("sampler") if batch_sampler is None else batch_sampler)

    def _wrap_length(self, original: Callable[[Any], int]) -> Callable[[Any], int]:
        @functools.wraps(original)
        def measure(loader: Any) -> int:
            length = original(loader)
            self._sizes[loader] = length
            found = self._loaders.get(loader)
            most = None if found is None else self._find_limit(found)
            return length if most is None else min(length, most)

        return measure

    def _note_request(self, index: Any, iterator: Any) -> None:
        iteration = self._iterations.get(iterator)
        if iteration is None:
            return
        text = _write_indices(index)
        if text:
            numbers = [iteration.last, *_read_numbers(text)]
            iteration.last = numbers[-1]
            descents = sum(after < before for before, after in pairwise(numbers))
            iteration.indices.append(Indices(fingerprint.hash_text(text), descents))

    def _wrap_delivery(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        @functools.wraps(original)
        def deliver(iterator: Any) -> Any:
            iteration = self._iterations.get(iterator)
            if iteration is None or not self._recorder.is_active:
                return original(iterator)
            most = self._find_limit(iteration.loader)
            if most is not None and iteration.delivered >= most and not iteration.loader.has_end:
                # A stream may have an end: only a script that calls next() itself shows that it expects none.
                most = None if not iteration.loader.is_stream or _calls_next(sys._getframe(1)) else most
            if most is not None and iteration.delivered >= most and iteration.loader.extra is None:
                iteration.loader.extra = self._compare_lengths(iteration.loader)
                most += iteration.loader.extra
            if most is not None and iteration.delivered >= most:
                self.has_cut = True
                raise StopIteration
            self._recorder.enter_data()
            try:
                batch = original(iterator)
            finally:
                self._recorder.leave_data()
                self._write_record(iteration, iterator)
            iteration.delivered += 1
            indices = iteration.indices.popleft() if iteration.indices else None
            self._unused[iteration.loader.number] = None if indices is None else indices.digest
            self._recorder.note_batch(iteration.loader.number, iteration.number, batch, indices or Indices(0, 0))
            self._delivered = _list_memory(batch)
            self._is_cycled = None
            return batch

        return deliver
