"""Hooks on modules that a rank's program imports, and the epoch and planned steps that they show.

Lines may not show these: they are read from Lightning, and from the sampler of the data.
"""

import functools
import math
import re
import sys
from collections.abc import Callable
from typing import Any

from . import counters
from .script_objects import is_instance, read_number

_FRAMES = 64  # searched for Lightning's Trainer
_LOOPS = re.compile(r"[/\\](?:lightning[/\\]pytorch|pytorch_lightning)[/\\]loops[/\\]")
_MOST = 2**31


def observe(
    original: Callable[..., Any],
    before: Callable[..., None] | None = None,
    after: Callable[..., None] | None = None,
) -> Callable[..., Any]:
    """Return a function that calls ``before`` with its arguments, and ``after`` with the result and the arguments."""

    @functools.wraps(original)
    def observed(*arguments: Any, **options: Any) -> Any:
        if before is not None:
            before(*arguments, **options)
        result = original(*arguments, **options)
        if after is not None:
            after(result, *arguments, **options)
        return result

    return observed


class ImportHook:
    """Meta path finder that calls ``watch`` after its module is loaded, and then removes itself."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._blind = False  # whether the module's loader cannot be wrapped

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Delegate to the remaining finders, and wrap the loader so that ``watch`` runs after the import."""
        if name != self._module:
            return None
        sys.meta_path.remove(self)

        spec = self._find_with_remaining_finders(name, path, target)
        try:
            execute = spec.loader.exec_module

            def execute_and_watch(module: Any) -> None:
                execute(module)
                self.watch(module)

            spec.loader.exec_module = execute_and_watch
        except AttributeError:
            self._blind = True
        return spec

    @staticmethod
    def _find_with_remaining_finders(name: str, path: Any, target: Any) -> Any:
        for finder in sys.meta_path:
            if not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                return spec
        return None

    def start(self) -> None:
        """Watch the module: now if it is loaded, as in a fork of the fork server, otherwise once it is imported."""
        if self._module in sys.modules:
            self.watch(sys.modules[self._module])
        else:
            sys.meta_path.insert(0, self)

    def watch(self, module: Any) -> None:
        """Act on the loaded module."""
        raise NotImplementedError


class EpochHook(ImportHook):
    """Publishes the epoch that a script sets in its ``DistributedSampler``. ``find_slot``: returns the current slot."""

    def __init__(self, find_slot: Callable[[], Any]) -> None:
        super().__init__("torch.utils.data.distributed")
        self._find_slot = find_slot

    def watch(self, module: Any) -> None:
        """Wrap the method."""
        find_slot = self._find_slot
        original = module.DistributedSampler.set_epoch

        def set_epoch(self: Any, epoch: Any) -> Any:
            number = read_number(epoch) if is_instance(epoch, int) else None
            if number is not None and 0 <= number < _MOST:
                find_slot()[counters.EPOCH] = number + 1.0
            return original(self, epoch)

        module.DistributedSampler.set_epoch = set_epoch


def read_lightning_plan(slot: Any) -> None:
    """Publish epoch, epochs, total and position of the Lightning Trainer in whose loop the caller's step is, if any."""
    trainer = _find_lightning_trainer()
    if trainer is None:
        return
    numbers = {
        counters.EPOCH: trainer.current_epoch + 1.0,
        counters.EPOCHS: trainer.max_epochs,
        counters.TOTAL_STEPS: trainer.estimated_stepping_batches,
    }
    for index, number in numbers.items():
        if isinstance(number, (int, float)) and 0 < number < _MOST:
            slot[index] = float(number)
    if math.isnan(slot[counters.FIRST_STEP]) and slot[counters.STEPS] == 1.0:
        slot[counters.FIRST_STEP] = float(trainer.global_step)


def _find_lightning_trainer() -> Any:
    """Return the Trainer of the innermost of Lightning's loops; None outside of them.

    Other frames are not read: until Python 3.13 that would keep the script's objects alive.
    """
    frame: Any = sys._getframe()
    for _ in range(_FRAMES):
        if frame is None:
            return None
        if _LOOPS.search(frame.f_code.co_filename):
            return frame.f_locals["self"].trainer
        frame = frame.f_back
    return None
