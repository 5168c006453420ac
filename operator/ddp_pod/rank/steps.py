"""Count a rank's optimizer steps through PyTorch's public hooks, without any change of the script.

A hook runs after each step of every optimizer of the process. It only counts: ten times a second it measures one whole
iteration, and once a second it reads other values. No hook shows the loss; see ``losses``.
"""

import math
import os
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Any

from . import counters
from .batches import BatchMeter
from .hooks import EpochHook, ImportHook, read_lightning_plan
from .losses import LossReader
from .script_objects import (
    find_function,
    find_own_function,
    list_bases,
    list_rates,
    read_attributes,
    read_number,
)

if TYPE_CHECKING:
    from .part import CreateSampler, StepObserver, StepSampler

_MODULE = "torch.optim.optimizer"
_SAMPLE_SECONDS = 0.1  # between two measured iterations, so that the last loss of a short run is no old one
_LOOK_SECONDS = 1.0  # between two readings of the other values
_BATCH_SECONDS = 5.0  # between two measurements of the batch size
_PAUSE_SECONDS = 1.0  # a shorter time between two steps is never a pause
_PAUSE_FACTOR = 10.0  # by which a pause is longer than a usual step
_MOST_OPTIMIZERS = 1024  # whose steps are compared with those of the followed one
_MOST_PARAMETERS = 8  # whose state is searched for the run's step
_NESTED_FRAMES = 16  # searched for another step of the same optimizer
# Names of this module, because a step has to find them quickly.
_now = time.monotonic
_STEPS = counters.STEPS
_LAST_STEP_TIME = counters.LAST_STEP_TIME


class StepCounter(ImportHook):
    """Counts the iterations of a training loop in a rank's slot.

    An iteration may step several optimizers. The first one that steps is followed; another one that steps twice
    meanwhile replaces it. So a GAN's iteration counts once, and a second training phase with a new optimizer continues
    the count.

    ``claim``: returns another slot at the first step, or None if this process is not to count. None: the slot is final.
    ``observers``: notified of every iteration; ``create_sampler``: returns what examines some, if none observes.
    """

    # What every step needs. The script's work has displaced it from the cache, so it is little and close together.
    __slots__ = ("_alarm", "_followed", "_is_capturing", "_sample_step", "_slot", "_steps")

    def __init__(
        self,
        slot: Any,
        claim: Callable[[], Any | None] | None = None,
        observers: "Sequence[StepObserver]" = (),
        create_sampler: "CreateSampler | None" = None,
    ) -> None:
        super().__init__(_MODULE)
        self._slot = slot
        self._claim = claim
        self._observers = observers
        self._create_sampler = create_sampler
        self._followed: Callable[[], Any] = _no_optimizer  # a weak reference
        self._steps = 0.0
        self._alarm = 0.0  # time from which a step does more than count
        self._sample_step = math.inf  # after which the sampler examines an iteration
        self._is_capturing: Callable[[], bool] | None = None  # None without CUDA

        self._peers: dict[int, float] = {}  # steps of the followed optimizer at the last one of each other, by id
        self._is_on_gpu = False  # there the host's time includes waits for the device and so for other ranks
        self._pause = math.inf  # seconds between two steps that are a pause
        self._has_worked = True  # whether a backward has followed the last step
        self._work_seconds = 0.0
        self._work_steps = 0.0  # for which they are known
        self._pause_seconds = 0.0
        self._longest = 0.0
        self._next_sample = 0.0
        self._next_look = 0.0
        self._next_batch = 0.0
        self._is_nested = False  # whether the followed optimizer's step may call another step of it
        self._torch: Any = None
        self._hook: Any = None
        self._losses: LossReader | None = None
        self._batch: BatchMeter | None = None  # of the current iteration, if it is measured
        self._sampler: StepSampler | None = None

    def watch(self, module: Any) -> None:
        """Register the hooks. ``module``: torch.optim.optimizer, loaded."""
        os.register_at_fork(after_in_child=self.stop)
        try:
            self._torch = sys.modules["torch"]
            for observer in self._observers:
                observer.watch(module)
            self._hook = module.register_optimizer_step_post_hook(self._build_hook())
            self._losses = LossReader(self._torch, self._slot, self._on_backward)
            EpochHook(lambda: self._slot).start()
            if self._create_sampler is not None and not self._observers:
                self._sampler = self._create_sampler(self._torch, lambda: self._slot, self._losses)
                self._sample_step = self._sampler.next_step if self._sampler is not None else math.inf
        except Exception:  # another version of PyTorch: the script runs without counters
            self.stop()
            return
        self._slot[counters.VISIBILITY] = counters.COUNTED

    def stop(self) -> None:
        """Stop counting: after an error, and in a child of the rank, which shares the slot."""
        self._slot = [0.0] * len(self._slot)
        for part in (self._losses, self._batch, *self._observers, self._sampler):
            if part is not None:
                part.stop()
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    # -- at every step

    def _build_hook(self) -> Callable[[Any, Any, Any], None]:
        def count_step(optimizer: Any, args: Any, kwargs: Any) -> None:
            try:
                now = _now()
                capturing = self._is_capturing
                is_usual = now < self._alarm and self._followed() is optimizer
                if is_usual and (capturing is None or not capturing()):
                    steps = self._steps + 1.0
                    self._steps = steps
                    slot = self._slot
                    slot[_STEPS] = steps
                    slot[_LAST_STEP_TIME] = now
                    if steps >= self._sample_step:
                        self._sample_iteration()
                else:
                    self._examine(optimizer, now)
            except Exception:  # a bug here must never reach the script
                self.stop()

        vars(count_step)["_torchdynamo_disable"] = True  # torch.compile calls it instead of tracing it
        return count_step

    # -- seldom

    def _examine(self, optimizer: Any, now: float) -> None:
        """Count a step after which values are read, unless it ends no iteration. A long step ends after the alarm."""
        if not (self._followed() is optimizer or self._follow(optimizer)) or not self._is_iteration(optimizer):
            return
        slot = self._slot
        seconds = now - slot[_LAST_STEP_TIME]
        if seconds > self._pause:
            self._note_pause(seconds)
        self._steps += 1.0
        slot[_STEPS] = self._steps
        slot[_LAST_STEP_TIME] = now
        if seconds > self._longest and self._steps > 1.0:
            self._longest = seconds
            slot[counters.LONGEST_STEP] = seconds
        if self._batch is not None:
            self._note_batch(float(self._batch.finish()))
            self._batch = None
        if self._steps >= self._sample_step:
            self._sample_iteration()
        is_sampled = self._sample(now)
        if now >= self._next_look:
            self._look(optimizer, now)
        for observer in self._observers:
            observer.end_step(optimizer)
        is_checked = is_sampled or self._batch is not None or self._is_nested or bool(self._observers)
        self._alarm = 0.0 if is_checked else self._next_sample

    def _sample_iteration(self) -> None:
        if self._sampler is not None:
            self._sampler.begin(int(self._steps))
            self._sample_step = self._sampler.next_step

    def _sample(self, now: float) -> bool:
        """End the measurement of an iteration. Returns whether the next one is measured."""
        is_sampled = now >= self._next_sample
        if is_sampled:
            self._next_sample = now + _SAMPLE_SECONDS
        self._has_worked = self._is_on_gpu or not is_sampled
        if self._losses is not None:
            self._losses.end_iteration(observe_next=is_sampled)
        return is_sampled

    def _on_backward(self) -> None:
        """Add the time from the last step to the first backward after it: the rank's own work, without its peers'.

        It stands for all iterations since the last one that was measured.
        """
        if self._has_worked:
            return
        self._has_worked = True
        seconds = _now() - self._slot[_LAST_STEP_TIME]
        if seconds < self._pause:
            self._work_seconds += seconds * (self._steps - self._work_steps)
            self._slot[counters.WORK_SECONDS] = self._work_seconds
        self._work_steps = self._steps

    def _follow(self, optimizer: Any) -> bool:
        """Follow this optimizer, which has stepped, if it leads the iterations. Returns whether it does."""
        if self._claim is not None and not self._claim_slot(self._claim):
            return False

        if self._followed() is not None:
            key = id(optimizer)
            if self._peers.get(key) != self._steps:
                if len(self._peers) >= _MOST_OPTIMIZERS:
                    self._peers.clear()
                self._peers[key] = self._steps
                return False
            self._steps += 1.0  # its first one

        self._followed = weakref.ref(optimizer)
        self._is_nested = _count_hooked_steps(type(optimizer)) > 1
        cuda = self._torch.cuda
        self._is_on_gpu = bool(cuda.is_initialized())
        self._is_capturing = cuda.is_current_stream_capturing if self._is_on_gpu else None
        self._alarm = 0.0
        return True

    def _claim_slot(self, claim: Callable[[], Any | None]) -> bool:
        """Count in the claimed slot from now on. Returns False, and stops, if there is none."""
        self._claim = None
        slot = claim()
        if slot is None:
            self.stop()
            return False
        slot[counters.EPOCH] = self._slot[counters.EPOCH]
        self._slot = slot
        if self._losses is not None:
            self._losses.move_to(slot)
        return True

    def _is_iteration(self, optimizer: Any) -> bool:
        """Return whether a step ends an iteration that is to be counted."""
        if self._is_nested and _is_inner_step(optimizer):
            return False
        if self._is_capturing is not None and self._is_capturing():
            self._slot[counters.VISIBILITY] = counters.INVISIBLE
            return False
        return True

    def _note_pause(self, seconds: float) -> None:
        """Record a time between two steps that is too long for a step, such as that of a validation."""
        self._pause_seconds += seconds - self._average
        self._slot[counters.PAUSE_SECONDS] = self._pause_seconds

    @property
    def _average(self) -> float:
        """Seconds of a step."""
        slot = self._slot
        seconds = slot[_LAST_STEP_TIME] - slot[counters.FIRST_STEP_TIME] - self._pause_seconds
        return seconds / (self._steps - 1.0) if self._steps > 1.0 else math.inf

    def _look(self, optimizer: Any, now: float) -> None:
        """Read the values that are not counted."""
        self._next_look = now + _LOOK_SECONDS
        slot = self._slot
        if self._steps == 1.0:
            slot[counters.FIRST_STEP_TIME] = now
            slot[counters.FIRST_STEP] = _find_first_step(optimizer)
        rate = next(list_rates(optimizer), None)
        if rate is not None:
            slot[counters.LEARNING_RATE] = rate
        with suppress(Exception):  # another Trainer than Lightning's
            read_lightning_plan(slot)
        self._pause = max(_PAUSE_SECONDS, _PAUSE_FACTOR * self._average)
        if now >= self._next_batch:
            self._next_batch = now + _BATCH_SECONDS
            self._batch = BatchMeter(self._torch)

    def _note_batch(self, batch: float) -> None:
        """Count samples. ``batch``: those of the last iteration; 0: unknown."""
        slot = self._slot
        former = slot[counters.BATCH]
        if batch == former:
            return
        # The steps before this one had the former size or, at the first measurement, the same size.
        steps = self._steps - slot[counters.STEPS_WITH_SAMPLES]
        slot[counters.SAMPLES] += (steps - 1.0) * (former or batch) + batch
        slot[counters.STEPS_WITH_SAMPLES] = self._steps
        slot[counters.BATCH] = batch


def _no_optimizer() -> None:
    """Replaces a weak reference whose object no longer exists."""


def _find_first_step(optimizer: Any) -> float:
    """Return the run's step before the optimizer's first one; NaN if its state, as that of SGD, has no step.

    An optimizer that was loaded from a checkpoint continues the count of its state.
    """
    states = read_attributes(optimizer).get("state")
    steps = []
    # The first values rather than those of the first parameters: a look-up would call a parameter's hash.
    for state in islice(dict.values(states), _MOST_PARAMETERS) if isinstance(states, dict) else ():
        step = read_number(state.get("step")) if type(state) is dict else None
        if step is not None:
            steps.append(step)
    return max(0.0, max(steps) - 1.0) if steps else math.nan


def _count_hooked_steps(kind: type) -> int:
    """Return how many classes of an optimizer have a step that calls the hooks."""
    steps = [find_own_function(base, "step") for base in list_bases(kind)]
    return sum(vars(step).get("hooked") is True for step in steps if step is not None)


def _is_inner_step(optimizer: Any) -> bool:
    """Return whether another step of the same optimizer called this one, as ``super().step()`` does."""
    step = find_function(type(optimizer), "step")  # PyTorch's wrapper, which calls the hooks
    code = None if step is None else step.__code__
    frame: Any = sys._getframe()
    calls = 0
    for _ in range(_NESTED_FRAMES):
        if frame is None:
            break
        if frame.f_code is code and frame.f_locals.get("self") is optimizer:
            calls += 1
        frame = frame.f_back
    return calls > 1
