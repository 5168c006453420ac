"""Record what a rank does at every step, for `ddp check`: ``contract`` describes order and records.

Only a run of `ddp check` has a recorder. It may cost time, but must not change what the script computes: it draws no
random numbers and keeps no graph. Its errors end the recording, not the script.
"""

import atexit
import contextlib
import functools
import gc
import json
import os
import signal
import sys
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple, TextIO

from ...base.files import read_json, write_json
from ...contract.records import read_record, to_json
from ...rank import fingerprint
from ...rank.batches import find_shared_dimension, has_trainable_parameter
from ...rank.groups import GroupRecorder
from ...rank.hooks import observe
from ...rank.script_objects import (
    IdentityMap,
    bypass_modes,
    find_own_function,
    is_of_package,
    is_tensor,
    is_training,
    list_buffers,
    list_groups,
    list_modules,
    list_names,
    list_optimized,
    list_parameters,
    list_placements,
    list_rates,
    list_values,
    read_attributes,
    read_property,
    read_tensor,
    strip_wrappers,
)
from ...rank.tracebacks import find_call
from .contract import (
    COMPLETED,
    ERROR,
    IDLE_SUFFIX,
    LIMIT,
    MARK_FILE,
    MODEL_DRAWS,
    MOST_BESIDE,
    MOST_OPENED,
    MOST_RECORDS,
    MOST_SAMPLES,
    ORDER_FILE,
    SCAN_STEP,
    SCRIPT_DRAWS,
    BatchRecord,
    EndRecord,
    IdleRecord,
    ModelRecord,
    RecordingOrder,
    StartRecord,
    StepRecord,
)
from .recorded_data import DataHook
from .recorded_draws import DrawMeter
from .recorded_saves import SaveHook
from .recorded_state import StateReader
from .sink import Indices

_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule")
_MOST_ELEMENTS = 1 << 24  # of a tensor in a batch
_MOST_NUMBERS = 999  # processes of a rank
_LIMIT_SECONDS = 10.0  # for which a rank waits at the last step until its peers have reached it
_MARK_SECONDS = 0.2  # a step's pause after the mark, so that a signal reaches a fast script
_MARK_STEPS = 50  # which have the pause


class _Key(NamedTuple):
    """A parameter: the position of its model, and its name there."""

    model: int
    name: str


class _LooseParameters:
    """Parameters that an optimizer has, and no module. It has the tables of a module."""

    def __init__(self, items: list[Any]) -> None:
        self._parameters = {f"parameter {number}": item for number, item in enumerate(items)}
        self._modules: dict[str, Any] = {}
        self._buffers: dict[str, Any] = {}


def _guard(method: Callable[..., None]) -> Callable[..., None]:
    """End the recording at an error of the recorder."""

    @functools.wraps(method)
    def guarded(self: "Recorder", *arguments: Any, **options: Any) -> None:
        if not self.is_active:
            return
        try:
            method(self, *arguments, **options)
        except Exception as error:
            self.is_active = False
            sys.stderr.write(f"ddp check: the record of rank {self.rank} ends here: {_describe(error)}\n")

    return guarded


def _describe(error: Exception) -> str:
    """Return an exception as text, unless it is one that the script defines: its handler of a signal may raise it."""
    return repr(error) if is_of_package(error, "builtins") else list_names(type(error))[0]


class Recorder:
    """Writes the records of one process, from its first training step on."""

    def __init__(self, folder: str, rank: int, world_size: int, groups: GroupRecorder, error: str = "") -> None:
        """``error``: the file that exists once the rank has ended with another exit code than 0."""
        self.rank = rank
        self._error = error
        self._world_size = world_size
        self._groups = groups
        self.is_active = True
        self.steps = 0
        self.order = read_record(RecordingOrder, read_json(os.path.join(folder, ORDER_FILE)))
        self._folder = folder
        self._number = 0
        self._file: TextIO | None = None
        self._waiting: list[dict[str, Any]] = []  # records before the file is open
        self._lines = 0
        self._opened: dict[str, None] = {}  # files that were read before the first step
        self._torch: Any = None
        self._has_hooks = False
        self.models: list[Any] = []
        self._members: set[int] = set()  # ids of the modules in the models
        self._evaluated = IdentityMap()  # unused batches at the last call, by module outside of the models
        self._called = IdentityMap()  # modules that the script calls itself
        self._depth = 0  # of the calls of modules
        self._buffer_owner: Any = None  # at whose next call the buffers of the iteration are read
        self._wrappers: list[weakref.ref[Any]] = []  # DistributedDataParallel, while it is built
        self._with_gradient: set[_Key] = set()
        self._cleared: set[_Key] = set()  # had a gradient after a backward, and none at any step
        self._skipped = 0  # steps, by a GradScaler
        self._optimizer_steps = 0
        self._optimizers: list[weakref.ref[Any]] = []
        self._optimizer_built = ""
        self._scheduled = ""
        self._measured = False  # whether the scheduler follows a metric
        self._beside: list[weakref.ref[Any]] = []
        self._draws: DrawMeter | None = None  # once the script builds an optimizer
        self._states: StateReader | None = None
        self._joins = False
        self._unsynchronized_parts = IdentityMap()  # of FSDP2: whether each module shares no gradients now
        self._places = IdentityMap()  # the lines that built the modules
        self._late = IdentityMap()  # modules that were built after an optimizer
        self._data = DataHook(self, folder)
        self._saves = SaveHook(self, folder)
        self._reset()

    def _reset(self) -> None:
        """Start an iteration."""
        self._batch: list[int] = []
        self._loss: list[str] = []
        self._backward = ""
        self._rates: list[float] = []
        self._gradients: dict[_Key, str] = {}  # digests
        self._not_finite = ""
        self._buffers: list[str] | None = None
        self._unsynchronized = False
        self._scales: list[str] = []
        self._state: tuple[str, ...] | None = None

    # -- hooks

    def watch(self, module: Any) -> None:
        """Hook the optimizers. ``module``: torch.optim.optimizer, loaded; the other modules may not be yet."""
        self._torch = sys.modules["torch"]
        os.register_at_fork(after_in_child=self.stop)
        module.register_optimizer_step_pre_hook(self._note_loose_parameters)
        module.register_optimizer_step_post_hook(self._note_optimizer_step)
        module.Optimizer.__init__ = observe(
            module.Optimizer.__init__, after=lambda _, optimizer, *arguments, **options: self._note_optimizer(optimizer)
        )
        kind = sys.modules["torch.nn.modules.module"].Module
        kind.__init__ = observe(kind.__init__, after=self._note_module)
        kind.__setstate__ = observe(kind.__setstate__, after=self._note_module)  # a copy has no other constructor
        self._data.start()
        sys.addaudithook(self._note_open)
        atexit.register(self._note_idle)

    def stop(self) -> None:
        """Stop recording: in a child, and in a process that does not train."""
        self.is_active = False
        self._file = None

    @_guard
    def _note_optimizer(self, optimizer: Any) -> None:
        """Hook the rest of PyTorch, which is loaded once the script builds an optimizer."""
        self._optimizers.append(weakref.ref(optimizer))
        self._optimizer_built = find_call().place
        if self._has_hooks:
            return
        self._has_hooks = True
        self._draws = DrawMeter(self._torch)
        self._states = StateReader(self._torch)
        self._hook_modules()
        self._torch.autograd.backward = observe(
            self._torch.autograd.backward, before=self._note_loss, after=self._note_backward
        )
        self._hook_scaler()
        self._hook_schedulers()
        self._hook_join()
        self._hook_shards()
        self._saves.start(self._torch)

    def _note_open(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Note the files that the script reads before its first step: one may end it there."""
        if event != "open" or self._file is not None or not self.is_active or len(self._opened) >= MOST_OPENED:
            return
        path, mode = arguments[:2]
        if type(path) is str and (type(mode) is not str or mode.startswith("r")):
            with contextlib.suppress(OSError):  # the current folder is gone
                self._opened[os.path.abspath(path)] = None

    def _note_idle(self) -> None:
        """Write what a process without a step has done. Files outside of the checked folder do not count."""
        if self._file is None and self.is_active:
            folder = os.path.join(os.path.realpath(self.order.folder), "")
            paths = map(os.path.realpath, self._opened)
            opened = tuple(path[len(folder) :] for path in paths if path.startswith(folder))
            with contextlib.suppress(OSError):
                write_json(self._path(IDLE_SUFFIX), to_json(IdleRecord(self._data.has_cut, opened)))

    def _note_module(self, _: None, module: Any, *arguments: Any, **options: Any) -> None:
        self._places[module] = _find_build(module)
        if self._optimizers:
            self._late[module] = True
        if _find_wrapper(module) == _WRAPPERS[0]:
            self._wrappers.append(weakref.ref(module))

    def _hook_join(self) -> None:
        kind = sys.modules["torch.distributed.algorithms.join"].Join
        kind.__enter__ = observe(kind.__enter__, before=self._note_join)
        kind.__exit__ = observe(kind.__exit__, after=lambda *_: self._end_together())

    def _hook_shards(self) -> None:
        """Note which modules of FSDP2 share their gradients: only the script's calls decide it."""
        module = sys.modules.get("torch.distributed.fsdp")
        kind = None if module is None else getattr(module, "FSDPModule", None)
        if kind is not None:
            kind.set_requires_gradient_sync = observe(kind.set_requires_gradient_sync, before=self._note_sharing)

    @_guard
    def _note_sharing(self, module: Any, shares: Any, *, recurse: bool = True) -> None:
        for _, part in list_modules(module) if recurse else [("", module)]:
            if _find_wrapper(part):
                self._unsynchronized_parts[part] = shares is False

    def _note_join(self, join: Any) -> None:
        self._joins = True

    def _hook_modules(self) -> None:
        original = self._torch.nn.Module.__call__
        recorder = self

        @functools.wraps(original)
        def call(module: Any, *arguments: Any, **options: Any) -> Any:
            recorder._depth += 1
            is_outermost = recorder._depth == 1
            try:
                if is_outermost:
                    recorder._note_call(module, arguments, options)
                elif module is recorder._buffer_owner:
                    recorder._note_buffers()
                return original(module, *arguments, **options)
            finally:
                recorder._depth -= 1
                if is_outermost:
                    recorder._note_draws(MODEL_DRAWS)

        self._torch.nn.Module.__call__ = call

    def _hook_schedulers(self) -> None:
        """Note the lines of their steps. Some schedulers define their step."""
        for kind in list(vars(sys.modules["torch.optim.lr_scheduler"]).values()):
            if isinstance(kind, type) and find_own_function(kind, "step") is not None:
                kind.step = observe(kind.step, before=self._note_schedule)  # type: ignore[attr-defined]

    @_guard
    def _note_schedule(self, scheduler: Any, *arguments: Any, **options: Any) -> None:
        if self.steps:  # a scheduler makes its first step while it is built
            self._scheduled = find_call().place
            self._measured = bool(arguments or options)

    def _hook_scaler(self) -> None:
        """Count the steps that a GradScaler skips: it then calls no optimizer."""
        scaler = self._torch.amp.GradScaler
        original = scaler.step
        recorder = self

        @functools.wraps(original)
        def step(scaler: Any, *arguments: Any, **options: Any) -> Any:
            before = recorder._optimizer_steps
            recorder._note_scale(scaler)
            result = original(scaler, *arguments, **options)
            if recorder._optimizer_steps == before:
                recorder._skipped += 1
                recorder._not_finite = ""  # as intended: the scaler found its factor too large
            return result

        scaler.step = step

    # -- during an iteration

    @_guard
    def _note_call(self, module: Any, arguments: Any, options: Any) -> None:
        """Record the input of an outermost module in training."""
        self._note_draws(SCRIPT_DRAWS)
        self._called[module] = True
        trains = is_training(module) and self._torch.is_grad_enabled()
        if is_training(module) and not trains:
            self._data.set_aside()
        elif id(module) in self._members and not trains:
            self._data.discard()
        elif not is_training(module):
            self._evaluated[module] = self._data.get_unused()
        if not (trains and has_trainable_parameter(self._torch, module)):
            return
        if id(module) not in self._members:
            self._add_model(module)
        self._data.use()
        self._unsynchronized = read_attributes(module).get("require_backward_grad_sync") is False or any(
            self._unsynchronized_parts.get(part) for _, part in list_modules(module)
        )
        with bypass_modes(self._torch):
            for tensor in fingerprint.find_tensors(self._torch, (arguments, options)):
                part = tensor.reshape(-1)[:_MOST_ELEMENTS]
                self._batch.append(fingerprint.digest(self._torch, part))
        if self._state is None:
            groups = [group for optimizer in self._optimizers for group in list_groups(optimizer())]
            self._state = () if self._states is None else self._states.read(sys._getframe(), self.models, groups)
        if self._buffers is None:
            # DistributedDataParallel makes the buffers equal in its call, before it calls its module.
            is_wrapped = _find_wrapper(module) == _WRAPPERS[0]
            self._buffer_owner = read_attributes(module)["_modules"]["module"] if is_wrapped else None
            if self._buffer_owner is None:
                self._note_buffers()

    @_guard
    def note_batch(self, loader: int, iteration: int, batch: Any, indices: Indices) -> None:
        """Record a batch that a DataLoader delivers."""
        with bypass_modes(self._torch):
            tensors = list(fingerprint.find_tensors(self._torch, batch))
            parts = [tensor.reshape(-1)[:_MOST_ELEMENTS] for tensor in tensors]
            content = fingerprint.combine(fingerprint.digest(self._torch, part) for part in parts)
            samples = fingerprint.digest_samples(self._torch, tensors, MOST_SAMPLES)
        self.write(
            BatchRecord(
                loader=loader,
                iteration=iteration,
                content=_write_digest(content) if tensors else "",
                indices=_write_digest(indices.digest & fingerprint.MASK) if indices.digest else "",
                descents=indices.descents,
                samples=tuple(map(_write_digest, samples)),
            )
        )

    def find_view(self, tensor: Any) -> tuple[int, str] | None:
        """Return the step after which a variable of the script had a tensor of the models' memory, and its name."""
        return None if self._states is None else self._states.views.get(tensor)

    @_guard
    def enter_data(self) -> None:
        """Note that a DataLoader starts to load."""
        if self._draws is not None:
            self._draws.enter_data(SCRIPT_DRAWS)

    @_guard
    def leave_data(self) -> None:
        """Note that a DataLoader has loaded."""
        if self._draws is not None:
            self._draws.leave_data()

    @_guard
    def _note_draws(self, source: str) -> None:
        """Note the users of random numbers since the last call."""
        if self._draws is not None:
            self._draws.mark(source)

    @_guard
    def _note_buffers(self) -> None:
        self._buffer_owner = None
        self._buffers = [self._digest(buffer) for model in self.models for _, buffer, _ in list_buffers(model)]

    @_guard
    def _note_loss(self, tensors: Any, *arguments: Any, **options: Any) -> None:
        self._backward = find_call().place
        for root in [tensors] if is_tensor(self._torch, tensors) else list_values(tensors):
            with bypass_modes(self._torch):
                plain = read_tensor(self._torch, root)
                if plain is None:
                    continue
                value = float(plain.sum())
            self._loss.append(value.hex())
            if value != value or value in (float("inf"), float("-inf")):
                self._not_finite = self._not_finite or f"the loss is {value}"

    @_guard
    def _note_backward(self, *_: Any, **options: Any) -> None:
        """Note which parameters have a gradient, which the script may clear before the step."""
        for key, parameter in self._list_parameters():
            if key not in self._with_gradient and read_property(self._torch, parameter, "grad") is not None:
                self._cleared.add(key)

    @_guard
    def _note_scale(self, scaler: Any) -> None:
        """Note the state of a GradScaler, without its methods."""
        attributes = read_attributes(scaler)
        with bypass_modes(self._torch):
            state = [read_tensor(self._torch, attributes.get(name)) for name in ("_scale", "_growth_tracker")]
            self._scales.append(" ".join("" if item is None else str(float(item)) for item in state))

    @_guard
    def _note_loose_parameters(self, optimizer: Any, arguments: Any, options: Any) -> None:
        """Before the first step, take the parameters of the optimizer for a model if the modules train none.

        Such are those of torch.func.functional_call.
        """
        if self.steps or self._optimizer_steps:
            return
        gradients = [read_property(self._torch, item, "grad") for _, item in self._list_parameters()]
        if any(gradient is not None for gradient in gradients):
            return
        items = [item for item in list_optimized(optimizer) if read_property(self._torch, item, "grad") is not None]
        if items:
            self._add_model(_LooseParameters(items))

    @_guard
    def _note_optimizer_step(self, optimizer: Any, arguments: Any, options: Any) -> None:
        """Record gradients and learning rates, which the script may change after the step."""
        self._optimizer_steps += 1
        self._rates += list_rates(optimizer)
        for key, parameter in self._list_parameters():
            gradient = read_property(self._torch, parameter, "grad")
            if gradient is None:
                continue
            self._with_gradient.add(key)
            self._cleared.discard(key)
            self._gradients[key] = self._digest(gradient)
            with bypass_modes(self._torch):
                part = read_tensor(self._torch, gradient)
                if not self._not_finite and part is not None and not bool(part.isfinite().all()):
                    self._not_finite = f"the gradient of {key.name} is not finite"

    @_guard
    def end_step(self, optimizer: Any) -> None:
        """Write the record of an iteration, then do what the order has for this step."""
        if not (self._loss or self._batch or any(self._rates)):
            self._reset()
            return  # torch.distributed.checkpoint creates an optimizer's state by a step without a rate
        self.steps += 1
        if self._file is None:
            self._open()
        self._saves.write_files()
        if self.steps <= SCAN_STEP:
            self._find_beside()
        self._note_draws(SCRIPT_DRAWS)
        batches = self._data.take()
        parameters = list(self._list_parameters())
        trainable = [key for key, parameter in parameters if self._requires_gradient(parameter)]
        group_size, group_rank = self._find_group()
        unoptimized, foreign = self._compare_with_optimizers()
        self.write(
            StepRecord(
                time=time.time(),
                step=self.steps,
                place=find_call().place,
                backward=self._backward,
                loss=tuple(self._loss[:64]),
                rates=tuple(self._rates[:64]),
                batch=_write_digest(fingerprint.combine(self._batch)) if self._batch else "",
                indices=_write_digest(fingerprint.combine(batches.indices)) if batches.indices else "",
                digests=tuple(self._digest(parameter) for _, parameter in parameters),
                gradients=tuple(self._gradients.get(key, "") for key, _ in parameters),
                buffers=tuple(self._buffers or ()),
                loaders=tuple(batches.loaders),
                without_gradient=tuple(key.name for key in trainable if key not in self._with_gradient)[:64],
                not_finite=self._not_finite,
                skipped=self._skipped,
                group_size=group_size,
                group_rank=group_rank,
                group_built=self._groups.place,
                joins=self._joins,
                unoptimized=tuple(unoptimized[:64]),
                foreign=foreign,
                optimizer=self._optimizer_built,
                scheduled=self._scheduled,
                measured=self._measured,
                unsynchronized=self._unsynchronized,
                draws=() if self._draws is None else self._draws.take(),
                state=self._state or (),
                beside=tuple(sorted(self._list_beside())),
                copies=tuple(sorted(self._list_copies())),
                scales=tuple(self._scales[:16]),
                cleared=tuple(key.name for key in trainable if key in self._cleared)[:64],
                optimized=() if self.steps > 1 else tuple(self._list_optimized()),
                cycled=self._data.is_cycled(batches),
            )
        )
        self._reset()
        self._obey()

    def _find_beside(self) -> None:
        """Find the modules that are no part of the models and contain none: a script may keep them anywhere."""
        self._beside = []
        kind = self._torch.nn.Module
        found = [item for item in gc.get_objects() if issubclass(type(item), kind) and id(item) not in self._members]
        parts = {id(item): [part for _, part in list_modules(item)] for item in found}
        inner = {id(part) for item in found for part in parts[id(item)][1:]}
        for item in found:
            is_apart = id(item) not in inner and not any(id(part) in self._members for part in parts[id(item)])
            if is_apart and any(True for _ in _list_state(item)):
                self._beside.append(weakref.ref(item))
        del self._beside[MOST_BESIDE:]

    def _list_beside(self) -> Iterator[str]:
        for reference in self._beside:
            module = reference()
            if module is not None:
                state = "".join(self._digest(tensor) for tensor in _list_state(module))
                yield f"{list_names(type(module))[0]}:{_write_digest(fingerprint.hash_text(state) & fingerprint.MASK)}"

    def _list_copies(self) -> Iterator[str]:
        """Yield those modules beside the models whose parameters have the shapes of a model's, as copies of it have."""
        shapes = {tuple(_list_shapes(self._torch, model)) for model in self.models}
        for reference in self._beside:
            module = reference()
            is_used = module is not None and self._called.get(module) is not None
            if is_used and tuple(_list_shapes(self._torch, module)) in shapes:
                state = "".join(self._digest(parameter) for _, parameter, _ in list_parameters(module))
                digest = _write_digest(fingerprint.hash_text(state) & fingerprint.MASK)
                yield f"{self._places.get(module, '')} {list_names(type(module))[0]}:{digest}"

    def _compare_with_optimizers(self) -> tuple[list[str], int]:
        """Return the parameters with a gradient that no optimizer has, and how many idle ones the models lack."""
        optimized = {id(item): item for optimizer in self._optimizers for item in list_optimized(optimizer())}
        known = set()
        missing = []
        for key, parameter in self._list_parameters():
            known.add(id(parameter))
            if key in self._with_gradient and id(parameter) not in optimized:
                missing.append(key.name)
        foreign = [
            item
            for number, item in optimized.items()
            if number not in known and read_property(self._torch, item, "grad") is None
        ]
        return missing, len(foreign)

    def _list_optimized(self) -> Iterator[str]:
        """Yield the names of the optimizers' parameters, in their order."""
        names = {id(parameter): key.name for key, parameter in self._list_parameters()}
        for optimizer in self._optimizers:
            for item in list_optimized(optimizer()):
                yield names.get(id(item), "")

    def _find_group(self) -> tuple[int, int]:
        """Return size and rank of the default process group; 0 without one."""
        distributed = self._torch.distributed
        if not (distributed.is_available() and distributed.is_initialized()):
            return 0, 0
        return distributed.get_world_size(), distributed.get_rank()

    # -- models

    def _add_model(self, module: Any) -> None:
        self.models.append(module)
        for _, member in list_modules(module):
            self._members.add(id(member))
            self._data.discard(self._evaluated.get(member, {}))
        parameters = list(list_parameters(module))
        parts = list_modules(module)
        wrappers = [(part, name) for _, part in parts if (name := _find_wrapper(part))]
        known = {id(parameter) for part, name in wrappers for parameter in _list_shared(part, name)}
        self.write(
            ModelRecord(
                time=time.time(),
                built=self._places.get(module, ""),
                wrapper=wrappers[0][1] if wrappers and self._are_shared(module, known) else "",
                bypassed=self._find_bypassed(module),
                unshared=self._list_unshared(module, [part for part, _ in wrappers], known),
                loose=type(module) is _LooseParameters,
                place=find_call().place,
                names=tuple(strip_wrappers(name) for name, _, _ in parameters),
                digests=tuple(self._digest(parameter) for _, parameter, _ in parameters),
                trainable=tuple(int(self._requires_gradient(parameter)) for _, parameter, _ in parameters),
                sharded=tuple(int(self._is_incomplete(module, parameter)) for _, parameter, _ in parameters),
                buffer_names=tuple(strip_wrappers(name) for name, _, _ in list_buffers(module)),
                places=tuple(self._places.get(owner, "") for _, _, owner in parameters),
                modules=tuple(f"{strip_wrappers(name)} {self._places.get(part, '')}" for name, part in parts),
                late=tuple(strip_wrappers(name) for name, part in parts if self._late.get(part)),
                shared=find_shared_dimension(parameter for _, parameter, _ in parameters),
            )
        )

    def _list_parameters(self) -> Iterator[tuple[_Key, Any]]:
        for number, model in enumerate(self.models):
            for name, parameter, _ in list_parameters(model):
                yield _Key(number, strip_wrappers(name)), parameter

    def _requires_gradient(self, parameter: Any) -> bool:
        return bool(read_property(self._torch, parameter, "requires_grad"))

    def _digest(self, tensor: Any) -> str:
        """Return the digest of a tensor; empty if its class defines how to compute."""
        with bypass_modes(self._torch):
            plain = read_tensor(self._torch, tensor)
            return "" if plain is None else _write_digest(fingerprint.digest(self._torch, plain))

    def _are_shared(self, module: Any, known: Collection[int]) -> bool:
        """Return whether all trainable parameters are among those that wrappers share. ``known``: the ids of these."""
        parameters = [parameter for _, parameter, _ in list_parameters(module)]
        return all(id(parameter) in known for parameter in parameters if self._requires_gradient(parameter))

    def _list_unshared(self, module: Any, wrappers: Sequence[Any], known: Collection[int]) -> tuple[str, ...]:
        """Return the trainable parameters in wrappers that do not know them: these were built before."""
        inside = {id(parameter) for wrapper in wrappers for _, parameter, _ in list_parameters(wrapper)}
        return tuple(
            strip_wrappers(name)
            for name, parameter, _ in list_parameters(module)
            if id(parameter) in inside and id(parameter) not in known and self._requires_gradient(parameter)
        )

    def _find_bypassed(self, module: Any) -> str:
        """Return the line of a DistributedDataParallel that has parameters of a module, which is called without it."""
        if any(_find_wrapper(part) for _, part in list_modules(module)):
            return ""
        own = {id(parameter) for _, parameter, _ in list_parameters(module)}
        for reference in self._wrappers:
            wrapper = reference()
            if wrapper is not None and any(id(parameter) in own for _, parameter, _ in list_parameters(wrapper)):
                return str(self._places.get(wrapper, ""))
        return ""

    def _is_incomplete(self, module: Any, parameter: Any) -> bool:
        """Return whether this rank cannot read the whole parameter."""
        is_sharded = any(placement.is_shard() for placement in list_placements(parameter))
        return is_sharded or _find_wrapper(module) == _WRAPPERS[1] or read_tensor(self._torch, parameter) is None

    # -- the file

    @_guard
    def write(self, record: Any) -> None:
        """Write a record: once the process has made a step."""
        raw = to_json(record)
        if self._file is None:
            self._waiting.append(raw)
            del self._waiting[:-MOST_RECORDS]
            return
        self._lines += 1
        if self._lines <= MOST_RECORDS:
            self._file.write(json.dumps(raw) + "\n")
            self._file.flush()

    def _open(self) -> None:
        """Open the file of this process. Raises: OSError."""
        for number in range(_MOST_NUMBERS):
            try:
                self._file = open(self._path(f"{number}.jsonl"), "x", encoding="utf-8")  # noqa: SIM115 # for the process's life
            except FileExistsError:
                continue
            self._number = number
            break
        waiting = self._waiting
        self._waiting = []
        atexit.register(self._note_end)
        self.write(StartRecord(time=time.time(), rank=self.rank, world_size=self._world_size))
        assert self._file is not None
        self._file.writelines(json.dumps(raw) + "\n" for raw in waiting)

    def _note_end(self) -> None:
        self._saves.write_files()
        reason = ERROR if os.path.exists(self._error) else COMPLETED
        self.write(EndRecord(time=time.time(), step=self.steps, reason=reason))

    def _path(self, suffix: str) -> str:
        return os.path.join(self._folder, f"{self.rank}.{suffix}")

    # -- the order

    def _obey(self) -> None:
        order = self.order
        if self._number < len(order.kills):
            kill = order.kills[self._number]
            if kill.step == self.steps and kill.rank in (None, self.rank):
                os.kill(os.getpid(), signal.SIGKILL)
        if order.mark and self._number == 0 and self.steps >= order.mark:
            self._pause_at_mark(self.steps - order.mark)
        elif order.steps and self.steps >= order.steps:
            if self._joins:
                self._note_limit()
            else:
                self._end()

    @_guard
    def _end_together(self) -> None:
        """End where the ranks leave a Join: they make different numbers of steps, and one has made the last one."""
        if self._count_at_limit():
            self._end()

    def _pause_at_mark(self, since: int) -> None:
        if self.rank == 0 and since == 0:
            open(os.path.join(self._folder, MARK_FILE), "w").close()
        if since > _MARK_STEPS:
            self._end()
        time.sleep(_MARK_SECONDS)

    def _end(self) -> None:
        """End the process once all ranks have reached the last step, so that none loses a peer before."""
        self.write(EndRecord(time=time.time(), step=self.steps, reason=LIMIT))
        self._note_limit()
        deadline = time.monotonic() + _LIMIT_SECONDS
        while time.monotonic() < deadline and self._count_at_limit() < self._world_size:
            time.sleep(0.02)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(0)

    def _note_limit(self) -> None:
        open(self._path(f"{self._number}.limit"), "w").close()

    def _count_at_limit(self) -> int:
        return sum(name.endswith(f".{self._number}.limit") for name in os.listdir(self._folder))


def _write_digest(number: int) -> str:
    return f"{number:016x}"


def _find_build(module: Any) -> str:
    """Return the line that builds a module: not one of its constructors."""
    frame: Any = sys._getframe(3)
    while frame.f_back is not None and frame.f_code.co_name == "__init__" and _is_argument(frame, module):
        frame = frame.f_back
    return find_call(frame).place


def _list_state(module: Any) -> Iterator[Any]:
    """Yield the parameters and buffers of a module."""
    yield from (tensor for _, tensor, _ in list_parameters(module))
    yield from (tensor for _, tensor, _ in list_buffers(module))


def _list_shapes(torch: Any, module: Any) -> Iterator[tuple[int, ...]]:
    """Yield the shapes of the parameters of a module."""
    for _, parameter, _ in list_parameters(module):
        yield tuple(read_property(torch, parameter, "shape"))


def _is_argument(frame: Any, module: Any) -> bool:
    names = frame.f_code.co_varnames
    return bool(names) and frame.f_locals.get(names[0]) is module


def _list_shared(module: Any, wrapper: str) -> list[Any]:
    """Return the parameters whose gradients a wrapper shares: DistributedDataParallel, those that it was built with."""
    known = read_attributes(module).get("_module_parameters") if wrapper == _WRAPPERS[0] else None
    return known if type(known) is list else [parameter for _, parameter, _ in list_parameters(module)]


def _find_wrapper(module: Any) -> str:
    """Return the class of a module that shares gradients; empty: it does not."""
    names = list_names(type(module))
    return next((name for name in _WRAPPERS if name in names), "")
