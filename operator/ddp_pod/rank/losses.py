"""Read the loss of a rank: the root of a ``backward()``, at most ten times a second, without waiting for a device.

A sampler of steps may keep the losses of all of them too.

PyTorch has no hook that shows this root. So the public method ``torch.Tensor.backward`` is wrapped. A call of
``torch.autograd.backward`` is not observed.
"""

import functools
import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from . import counters
from .script_objects import bypass_modes

_SECONDS = 0.05  # between two losses: half of the time between two observed iterations


class _Loss(NamedTuple):
    """A loss on its device. ``scale``: a tensor by which it was multiplied; ``divisor``: by which it was divided."""

    value: Any
    scale: Any
    divisor: float


class LossKeeper(Protocol):
    """Gets the roots of all backwards. It may neither wait for a device nor compute anything."""

    def add(self, step: float, root: Any) -> None:
        """Add the root of a backward of a step."""


class LossReader:
    """Keeps the last loss in a rank's slot. ``on_backward``: called before each backward of an observed iteration.

    The factor of a GradScaler, and the division by the number of accumulated batches, are undone.

    ``history``: gets the losses of all iterations; None: they are not kept.
    """

    __slots__ = ("__dict__", "_is_observing", "history")  # the last two are what every backward needs

    def __init__(self, torch: Any, slot: Any, on_backward: Callable[[], None]) -> None:
        self._torch = torch
        self._slot = slot
        self._on_backward = on_backward
        self._is_observing = True  # whether this iteration is observed
        self.history: LossKeeper | None = None
        self._next = 0.0
        self._backwards = 0  # of this iteration
        self._per_step = 1.0  # backwards of an iteration
        self._pinned: Any = None
        self._event: Any = None  # of a copy from a GPU that is under way
        self._divisor = 1.0  # of the loss that is copied
        torch.Tensor.backward = self._wrap(torch.Tensor.backward)

    def _wrap(self, original: Callable[..., Any]) -> Callable[..., Any]:
        reader = self

        @functools.wraps(original)
        def backward(self: Any, *args: Any, **kwargs: Any) -> Any:
            if reader._is_observing:
                reader._observe(self)
            if reader.history is not None:
                reader._keep(reader.history, self)
            return original(self, *args, **kwargs)

        vars(backward)["_torchdynamo_disable"] = True  # torch.compile calls it instead of tracing it
        return backward

    def stop(self) -> None:
        """Stop reading losses."""
        self._is_observing = False
        self.history = None

    def move_to(self, slot: Any) -> None:
        """Publish in another slot, with the loss that is known."""
        for index in (counters.LOSS, counters.HAS_LOSS, counters.LOST_LOSS_STEP):
            slot[index] = self._slot[index]
        self._slot = slot

    def end_iteration(self, *, observe_next: bool) -> None:
        """Publish a loss whose copy has ended. ``observe_next``: whether the next iteration is observed."""
        if self._is_observing and self._backwards:
            self._per_step = float(self._backwards)
        self._backwards = 0
        self._is_observing = observe_next
        if self._event is not None and self._event.query():
            self._event = None
            self._publish(float(self._pinned[0]), float(self._pinned[1]), self._divisor)

    def _observe(self, root: Any) -> None:
        try:
            self._on_backward()
            self._backwards += 1
            now = time.monotonic()
            if now >= self._next:
                self._next = now + _SECONDS
                with bypass_modes(self._torch):
                    self._take(root)
        except Exception:  # a bug here must never reach the script
            self.stop()

    def _keep(self, history: LossKeeper, root: Any) -> None:
        try:
            with bypass_modes(self._torch):
                history.add(self._slot[counters.STEPS] + 1.0, root)
        except Exception:  # a bug here must never reach the script
            self.history = None

    def _take(self, root: Any) -> None:
        """Read a loss on the CPU, or start to copy one from a GPU."""
        if type(root) is not self._torch.Tensor or root.numel() != 1:
            return  # the value of a subclass such as DTensor may need all ranks
        loss = self._find_loss(root)
        if loss is None:
            return
        if root.device.type == "cpu":
            scale = 1.0 if loss.scale is None else float(loss.scale)
            self._publish(float(loss.value), scale, loss.divisor)
        elif root.device.type == "cuda" and self._event is None:
            self._start_copy(loss)

    def _find_loss(self, root: Any) -> _Loss | None:
        """Return a loss and its factors; None if a hook of the script would have to restore a factor."""
        node = root.grad_fn
        scale = None
        if node is not None and node.name() == "MulBackward0":
            if _is_hooked(node):
                return None
            factor = node._saved_other
            is_tensor = factor is not None and factor.numel() == 1 and factor.dtype is self._torch.float32
            if is_tensor and not factor.requires_grad:
                scale = factor.detach()
                node = node.next_functions[0][0]
        divisor = 1.0
        if node is not None and node.name() == "DivBackward0":
            if _is_hooked(node):
                return None
            number = node._saved_other
            if number is not None and number.numel() == 1 and number.device.type == "cpu":
                divisor = float(number)
        return _Loss(root.detach(), scale, divisor)

    def _start_copy(self, loss: _Loss) -> None:
        cuda = self._torch.cuda
        if cuda.is_current_stream_capturing():
            return
        if self._pinned is None:
            self._pinned = self._torch.ones(2, pin_memory=True)
        self._pinned[0:1].copy_(loss.value.float().reshape(1), non_blocking=True)
        if loss.scale is None:
            self._pinned[1] = 1.0
        else:
            self._pinned[1:2].copy_(loss.scale.reshape(1), non_blocking=True)
        self._divisor = loss.divisor
        self._event = cuda.Event()
        self._event.record(cuda.current_stream(loss.value.device))

    def _publish(self, value: float, scale: float, divisor: float) -> None:
        # GradScaler's factor is a power of two; another factor belongs to the loss.
        if scale >= 1.0 and math.frexp(scale)[0] == 0.5:
            value /= scale
        if divisor > 1.0 and divisor == self._per_step:
            value *= divisor
        slot = self._slot
        slot[counters.LOSS] = value
        slot[counters.HAS_LOSS] = 1.0
        if math.isfinite(value):
            slot[counters.LOST_LOSS_STEP] = 0.0
        elif not slot[counters.LOST_LOSS_STEP]:
            slot[counters.LOST_LOSS_STEP] = slot[counters.STEPS] + 1.0


def _is_hooked(node: Any) -> bool:
    """Return whether the tensor that a product or quotient saved is in the hands of ``saved_tensors_hooks``."""
    return getattr(node._raw_saved_other, "unpack_hook", None) is not None
