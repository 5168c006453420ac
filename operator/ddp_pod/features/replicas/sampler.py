"""Sample a rank's parameters and batches, so that the launchers can compare those of all ranks.

A sample is taken when the outermost module is called first after a step: optimizers that update a part of the
parameters in each rank have shared them by then. The step alone decides which part of the parameters it covers.
"""

import math
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any, NamedTuple

from ...rank import counters
from ...rank.batches import find_shared_dimension, has_compiled, has_trainable_parameter
from ...rank.fingerprint import digest_on_device, find_tensors, hash_text
from ...rank.losses import LossReader
from ...rank.script_objects import (
    bypass_modes,
    is_distributed,
    is_training,
    list_modules,
    list_names,
    list_parameters,
    list_placements,
    read_attributes,
    read_property,
    read_tensor,
    strip_wrappers,
)
from .loss_history import LossHistory
from .samples import ReplicaSample, write_sample

_SHARE = 0.003  # of the time of steps, at most, for samples
_SECONDS = 0.5  # between two samples, at least, once their cost is known
_LONGEST_INTERVAL = 1 << 22  # steps
_ELEMENTS = {"cpu": 1 << 16, "cuda": 1 << 20}  # of a part of the parameters
_MOST_TENSORS = 8  # of a part, and of a batch
_BATCH_ELEMENTS = 1 << 14  # of a tensor, evenly distributed
_MOST_CALLS = 64  # of modules, until one shows a tensor
_MOST_PENDING = 4  # samples whose digests are copied from a GPU
_MIX = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


class _Piece(NamedTuple):
    parameter: Callable[[], Any]  # a weak reference
    start: int
    end: int


class _Layout(NamedTuple):
    """The parts of a model's parameters. ``key``, ``data``, ``shares``: see ReplicaSample."""

    module: Callable[[], Any]
    parts: list[list[_Piece]]
    key: int
    data: int
    shares: int


class _Pending(NamedTuple):
    sample: ReplicaSample
    event: Any
    digests: Any
    loss_steps: list[int]
    losses: Any


class ReplicaSampler:
    """Takes samples of iterations. ``find_slot``: returns the rank's current slot.

    ``reader``: keeps losses from the first sample on; ``next_step``: the step for which to call ``begin``.
    """

    def __init__(self, torch: Any, find_slot: Callable[[], Any], reader: LossReader) -> None:
        self._torch = torch
        self._find_slot = find_slot
        self._reader = reader
        self._history = LossHistory(torch)
        self.next_step = 1.0
        self._step = 0
        self._interval = 2
        self._cost = 0.0  # seconds of a sample
        self._pair = 0
        self._pair_time = math.inf
        self._layout: _Layout | None = None
        self._calls = 0
        self._parameters: Any = None  # the digest of this sample
        self._part = 0
        self._spent = 0.0
        self._pending: list[_Pending] = []
        self._hook: Any = None

    def begin(self, step: int) -> None:
        """Take a sample of the next iteration if ``step``, the last one that was made, is due."""
        try:
            if self.next_step < math.inf:
                self._begin(step)
        except Exception:  # the steps are still counted
            self.stop()

    def _begin(self, step: int) -> None:
        self.end()
        self._publish()
        if has_compiled():
            self._reader.history = None
        elif step == self.next_step and len(self._pending) < _MOST_PENDING:
            self._step = step
            self._hook = sys.modules["torch.nn.modules.module"].register_module_forward_pre_hook(self._build_hook())
        if step % 2 == 0:
            self._set_interval(step)
        self.next_step = float(find_next_step(step, self._interval))

    def end(self) -> None:
        """Stop to observe modules."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        self._parameters = None
        self._calls = 0

    def stop(self) -> None:
        """Take no more samples."""
        self.end()
        self._reader.history = None
        self.next_step = math.inf

    def _set_interval(self, step: int) -> None:
        """Adapt the steps between two pairs of samples to their cost: a power of two, so that ranks may differ."""
        now = time.monotonic()
        if now > self._pair_time and step > self._pair:
            seconds = (now - self._pair_time) / (step - self._pair)
            least = max(2 * self._cost / _SHARE, _SECONDS) / seconds
            self._interval = 2 ** min(max(1, math.ceil(math.log2(least))), _LONGEST_INTERVAL.bit_length() - 1)
        self._pair = step
        self._pair_time = now

    def _build_hook(self) -> Any:
        def observe_call(module: Any, inputs: Any) -> None:
            try:
                if self._is_capturing():
                    self.end()  # a copy to the host would end the capture of a CUDA graph, and a replay repeat it
                elif is_training(module) and self._torch.is_grad_enabled():
                    with bypass_modes(self._torch):
                        self._observe(module, inputs)
            except Exception:  # a bug here must never reach the script
                self.stop()

        vars(observe_call)["_torchdynamo_disable"] = True  # torch.compile calls it instead of tracing it
        return observe_call

    def _is_capturing(self) -> bool:
        cuda = self._torch.cuda
        return bool(cuda.is_initialized() and cuda.is_current_stream_capturing())

    def _observe(self, module: Any, inputs: Any) -> None:
        if self._calls == 0 and not has_trainable_parameter(self._torch, module):
            return  # a loss function
        self._calls += 1
        if self._calls == 1:
            layout = self._find_layout(module)
            if layout is None:
                self.end()
                return
            start = time.perf_counter()
            self._part = find_part(self._step, len(layout.parts))
            self._parameters = self._digest_part(layout.parts[self._part])
            self._spent = time.perf_counter() - start
        # A module that is called with keyword arguments shows its batch in the first call inside.
        start = time.perf_counter()
        batch = self._digest_batch(inputs)
        self._spent += time.perf_counter() - start
        if batch is not None or self._calls >= _MOST_CALLS:
            self._finish(batch)

    def _finish(self, batch: Any) -> None:
        layout = self._layout
        assert layout is not None
        digests = [self._parameters, batch]
        self.end()
        start = time.perf_counter()
        sample = ReplicaSample(self._step, self._part, 0, layout.key, 0, layout.data, layout.shares)
        loss_steps, losses = self._history.stack()
        self._reader.history = self._history
        if all(value is None or value.device.type == "cpu" for value in (*digests, losses)):
            numbers = [0 if digest is None else int(digest) for digest in digests]
            self._write(_Pending(sample, None, numbers, loss_steps, [] if losses is None else losses.tolist()))
        else:
            self._start_copy(sample, digests, loss_steps, losses)
        spent = self._spent + time.perf_counter() - start
        self._cost = spent if self._cost == 0.0 else (self._cost + spent) / 2

    def _start_copy(self, sample: ReplicaSample, digests: list[Any], loss_steps: list[int], losses: Any) -> None:
        cuda = self._torch.cuda
        numbers = self._torch.zeros(2, dtype=self._torch.int64, device="cpu", pin_memory=True)
        for index, digest in enumerate(digests):
            if digest is not None:
                numbers[index : index + 1].copy_(digest.reshape(1), non_blocking=True)
        values = self._torch.empty(len(loss_steps), device="cpu", pin_memory=True)
        if losses is not None:
            values.copy_(losses, non_blocking=True)
        event = cuda.Event()
        event.record(cuda.current_stream())
        self._pending.append(_Pending(sample, event, numbers, loss_steps, values))

    def _publish(self) -> None:
        """Write samples whose copy has ended."""
        while self._pending and self._pending[0].event.query():
            pending = self._pending.pop(0)
            self._write(pending._replace(digests=pending.digests.tolist(), losses=pending.losses.tolist()))

    def _write(self, taken: _Pending) -> None:
        digest, batch = taken.digests
        lost = self._history.find_lost(taken.loss_steps, taken.losses)
        # 0 is unknown, and the digest of zeros.
        write_sample(self._find_slot(), taken.sample._replace(digest=digest or 1, batch=batch, lost=lost))

    def _digest_part(self, pieces: list[_Piece]) -> Any:
        total = None
        for number, piece in enumerate(pieces):
            flat = read_tensor(self._torch, piece.parameter()).reshape(-1)[piece.start : piece.end]
            digest = digest_on_device(self._torch, flat) * (2 * number + 1)
            total = digest if total is None else total + digest
        return total

    def _digest_batch(self, inputs: Any) -> Any:
        """Return a digest of some elements of the tensors in a module's arguments; None without a tensor."""
        total = None
        for number, tensor in enumerate(find_tensors(self._torch, inputs)):
            if number == _MOST_TENSORS:
                break
            flat = tensor.reshape(-1)
            stride = -(-flat.numel() // _BATCH_ELEMENTS) or 1
            digest = digest_on_device(self._torch, flat[::stride]) * (2 * number + 1)
            total = digest if total is None else total.to(digest.device) + digest
        return total

    # -- models

    def _find_layout(self, module: Any) -> _Layout | None:
        """Return the parts of a model that is trained by all ranks of the job; None: it is not to be sampled."""
        layout = self._layout
        is_known = layout is not None and layout.module() is module
        if layout is None or not is_known or any(piece.parameter() is None for part in layout.parts for piece in part):
            self._layout = layout = self._build_layout(module) if self._is_in_group() else None
        return layout if layout is not None and layout.parts else None

    def _is_in_group(self) -> bool:
        """Return whether the default process group spans all ranks, under the numbers that the launcher gave them."""
        distributed = self._torch.distributed
        if not (distributed.is_available() and distributed.is_initialized()) or "torchft" in sys.modules:
            return False
        slot = self._find_slot()
        size = distributed.get_world_size()
        return size > 1 and (size, distributed.get_rank()) == (slot[counters.WORLD_SIZE], slot[counters.RANK])

    def _build_layout(self, module: Any) -> _Layout:
        torch = self._torch
        ignored = _list_ignored(module)
        named = [(strip_wrappers(name), parameter) for name, parameter, _ in list_parameters(module)]
        parameters = [parameter for name, parameter in named if name not in ignored]
        names = [
            f"{name} {tuple(read_property(torch, parameter, 'shape'))} {_find_shard(parameter)}"
            for name, parameter in named
        ]
        scope = _find_scope(torch.distributed, module, parameters)
        return _Layout(
            weakref.ref(module),
            list(_divide(torch, parameters)),
            hash_text("\n".join([scope.replicas, *names])) or 1 if scope.replicas else 0,
            hash_text(scope.data) or 1 if scope.data else 0,
            int(scope.shares),
        )


class _Scope(NamedTuple):
    """The ranks with equal parameters, and those with different batches, as texts; empty: unknown."""

    replicas: str
    data: str
    shares: bool


def _list_ignored(module: Any) -> frozenset[str]:
    """Return the names of the parameters that DistributedDataParallel leaves out."""
    names = read_attributes(module).get("parameters_to_ignore")
    return frozenset(name for name in names if type(name) is str) if type(names) is set else frozenset()


def _find_scope(distributed: Any, module: Any, parameters: list[Any]) -> _Scope:
    kinds = {name for _, part in list_modules(module) for name in list_names(type(part))}
    own = list_names(type(module))
    attributes = read_attributes(module)
    if "DistributedDataParallel" in own:
        ranks = str(distributed.get_process_group_ranks(attributes["process_group"]))
        hooks = [hook for hook, _ in attributes["_comm_hooks"] if type(hook) is FunctionType]
        is_local = any("localsgd" in hook.__name__.lower() for hook in hooks)
        return _Scope("" if is_local else ranks, ranks, shares=True)
    if "FullyShardedDataParallel" in kinds:
        group = attributes.get("process_group")
        return _Scope("", str(distributed.get_process_group_ranks(group)) if group is not None else "", shares=True)
    meshes = [parameter.device_mesh for parameter in parameters if is_distributed(parameter)]
    if meshes:
        is_data = "FSDPModule" in own and not find_shared_dimension(parameters)
        is_data = is_data and all(_count_shards(parameter) <= 1 for parameter in parameters)
        ranks = str(sorted({int(rank) for mesh in meshes for rank in mesh.mesh.flatten().tolist()}))
        return _Scope(ranks, ranks if is_data else "", shares="FSDPModule" in own)
    with_subgroups = len(distributed.distributed_c10d._world.pg_map) > 1 or "DistributedDataParallel" in kinds
    is_pipeline = "torch.distributed.pipelining" in sys.modules  # its stages may be of one kind
    group = "" if with_subgroups or is_pipeline else "all"
    return _Scope(group, group, shares=False)


def _count_shards(parameter: Any) -> int:
    return sum(not placement.is_replicate() for placement in list_placements(parameter))


def _find_shard(parameter: Any) -> list[int]:
    """Return the coordinates of a DTensor's part, without those of its replicas."""
    placements = list_placements(parameter)
    if not placements:
        return []
    coordinates = parameter.device_mesh.get_coordinate() or ()
    return [place for place, placement in zip(coordinates, placements, strict=False) if not placement.is_replicate()]


def _divide(torch: Any, parameters: list[Any]) -> Iterator[list[_Piece]]:
    """Divide parameters into parts of limited elements and tensors, each of one device."""
    pieces: list[_Piece] = []
    size = 0
    former = None
    for parameter in parameters:
        tensor = read_tensor(torch, parameter)
        if tensor is None:
            continue
        limit = _ELEMENTS[tensor.device.type]
        for start in range(0, tensor.numel(), limit):
            end = min(start + limit, tensor.numel())
            if pieces and (size + end - start > limit or len(pieces) == _MOST_TENSORS or tensor.device != former):
                yield pieces
                pieces = []
                size = 0
            pieces.append(_Piece(weakref.ref(parameter), start, end))
            size += end - start
            former = tensor.device
    if pieces:
        yield pieces


def find_next_step(step: int, interval: int) -> int:
    """Return the next step of which to take a sample: two in a row at distances that double up to the interval."""
    if step % 2 == 0:
        return step + 1
    pair = step - 1
    return min(2 * pair, (pair // interval + 1) * interval) if pair else 2


def find_part(step: int, parts: int) -> int:
    """Return which part of the parameters to sample: the same in all ranks, and at two steps in a row."""
    number = (step // 2 * _MIX) & _MASK
    number = ((number ^ (number >> 32)) * _MIX) & _MASK
    return ((number >> 32) * parts) >> 32
