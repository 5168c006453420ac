"""Record the DataLoaders of a script, and end their iterations early."""

import functools
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from ..contract.check_record import LoaderRecord
from . import fingerprint
from .hooks import ImportHook, observe
from .tracebacks import find_call

if TYPE_CHECKING:
    from .recorder import Recorder

_MODULE = "torch.utils.data.dataloader"


class Batches(NamedTuple):
    """What the DataLoaders have delivered for one step: the digests of indices, and the numbers of the loaders."""

    indices: list[int]
    loaders: list[int]


class _Loader:
    """A DataLoader of the script.

    ``number``: in the order in which they were built; ``length``: its batches; None: it has no length; ``skipped``:
    batches at the beginning of an epoch that it leaves out, as accelerate does after a resume.
    """

    def __init__(self, number: int, built: str, length: int | None = None, skipped: int = 0) -> None:
        self.number = number
        self.built = built
        self.length = length
        self.skipped = skipped
        self.iterations = 0


class _Iteration:
    """One iteration of a DataLoader. ``indices``: digests of the batches that were requested and not delivered."""

    def __init__(self, loader: _Loader) -> None:
        self.loader = loader
        self.delivered = 0
        self.indices: deque[int] = deque()


class _SamplerHook(ImportHook):
    """Notes where the script builds each DistributedSampler."""

    def __init__(self) -> None:
        super().__init__("torch.utils.data.distributed")
        self._places: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()

    def watch(self, module: Any) -> None:
        """Wrap the constructor."""
        kind = module.DistributedSampler
        kind.__init__ = observe(kind.__init__, after=self._note_place)

    def _note_place(self, _: None, sampler: Any, *arguments: Any, **options: Any) -> None:
        self._places[sampler] = find_call().place

    def find_place(self, sampler: Any) -> str:
        """Return the line that built a sampler; empty if it is unknown."""
        return "" if sampler is None else self._places.get(sampler, "")


_UNKNOWN = _Loader(-1, "")  # until the loader's iteration begins


class DataHook(ImportHook):
    """Hooks PyTorch's DataLoader once it is imported."""

    def __init__(self, recorder: "Recorder") -> None:
        super().__init__(_MODULE)
        self._recorder = recorder
        self._loaders: weakref.WeakKeyDictionary[Any, _Loader] = weakref.WeakKeyDictionary()
        self._iterations: weakref.WeakKeyDictionary[Any, _Iteration] = weakref.WeakKeyDictionary()
        self._samplers = _SamplerHook()
        self._count = 0
        self._batches = Batches([], [])
        self._unused: dict[int, int | None] = {}  # by loader: the last batch's indices

    def start(self) -> None:
        """Watch for the imports."""
        self._samplers.start()
        super().start()

    def use(self) -> None:
        """Note that a model is called: of each loader, with the last batch. Those before are skipped after a resume."""
        for loader, indices in self._unused.items():
            self._batches.loaders.append(loader)
            if indices is not None:
                self._batches.indices.append(indices)
        self._unused.clear()

    def discard(self) -> None:
        """Note that a model is evaluated: with the batches since the last call of a model."""
        self._unused.clear()

    def take(self) -> Batches:
        """Return what the models were called with since the last call."""
        self.use()
        batches = self._batches
        self._batches = Batches([], [])
        return batches

    def watch(self, module: Any) -> None:
        """Hook the loader and its iterator."""
        loader = module.DataLoader
        iterator = module._BaseDataLoaderIter
        loader.__init__ = observe(loader.__init__, after=self._note_loader)
        loader.__iter__ = self._wrap_iteration(loader.__iter__)
        loader.__len__ = self._wrap_length(loader.__len__)
        iterator._reset = observe(iterator._reset, before=self._forget)
        iterator._next_index = observe(iterator._next_index, after=self._note_request)
        iterator.__next__ = self._wrap_delivery(iterator.__next__)

    def _note_loader(self, _: None, loader: Any, *arguments: Any, **options: Any) -> None:
        if self._recorder.is_active and loader not in self._loaders:
            skipped = int(getattr(loader.batch_sampler, "skip_batches", 0))
            self._loaders[loader] = _Loader(self._count, find_call().place, self._find_length(loader), skipped)
            self._count += 1

    def _wrap_iteration(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        @functools.wraps(original)
        def iterate(loader: Any) -> Any:
            found = self._loaders.get(loader)
            if found is not None and self._recorder.is_active:
                self._note_iteration(loader, found)
            iterator = original(loader)
            if found is not None and hasattr(iterator, "_next_index"):
                self._begin(iterator, found)
            return iterator

        return iterate

    def _begin(self, iterator: Any, loader: _Loader) -> None:
        """Count from 0 again. Workers have requested batches before: their iterator was reset."""
        iteration = _Iteration(loader)
        former = self._iterations.get(iterator)
        if former is not None and former.loader is _UNKNOWN:
            iteration.indices = former.indices
        self._iterations[iterator] = iteration

    def _forget(self, iterator: Any, *arguments: Any, **options: Any) -> None:
        """Forget what the workers of a former iteration have prefetched."""
        self._iterations[iterator] = _Iteration(_UNKNOWN)

    def _note_iteration(self, loader: Any, found: _Loader) -> None:
        found.iterations += 1
        samplers = (loader.sampler, getattr(loader.batch_sampler, "sampler", None))
        distributed = next((sampler for sampler in samplers if hasattr(sampler, "set_epoch")), None)
        self._recorder.write(
            LoaderRecord(
                time=time.time(),
                loader=found.number,
                iteration=found.iterations,
                built=found.built,
                place=find_call().place,
                batches=found.length,
                sampler_built=self._samplers.find_place(distributed),
                shuffles=None if distributed is None else bool(getattr(distributed, "shuffle", False)),
                epoch=None if distributed is None else int(getattr(distributed, "epoch", 0)),
            )
        )

    def _find_limit(self, loader: _Loader) -> int | None:
        """Return after how many batches an iteration ends; None: it is not cut."""
        most = self._recorder.order.batches
        if not most or not self._recorder.is_active:
            return None
        return max(0, most - loader.skipped)

    def _find_length(self, loader: Any) -> int | None:
        try:
            return int(type(loader).__len__.__wrapped__(loader))
        except (AttributeError, TypeError, NotImplementedError):
            return None  # an IterableDataset without a length

    def _wrap_length(self, original: Callable[[Any], int]) -> Callable[[Any], int]:
        @functools.wraps(original)
        def measure(loader: Any) -> int:
            length = original(loader)
            found = self._loaders.get(loader)
            most = None if found is None else self._find_limit(found)
            return length if most is None else min(length, most)

        return measure

    def _note_request(self, index: Any, iterator: Any) -> None:
        text = str(index)
        iteration = self._iterations.get(iterator)
        if iteration is not None and "None" not in text:  # an IterableDataset has no indices
            iteration.indices.append(fingerprint.hash_text(text))

    def _wrap_delivery(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        @functools.wraps(original)
        def deliver(iterator: Any) -> Any:
            iteration = self._iterations.get(iterator)
            if iteration is None or not self._recorder.is_active:
                return original(iterator)
            most = self._find_limit(iteration.loader)
            if most is not None and iteration.delivered >= most:
                raise StopIteration
            batch = original(iterator)
            iteration.delivered += 1
            self._unused[iteration.loader.number] = iteration.indices.popleft() if iteration.indices else None
            return batch

        return deliver
