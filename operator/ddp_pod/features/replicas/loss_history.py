"""The step since which a rank's loss is lost: not finite, or absurdly large before it became so.

A corrupt parameter or batch of one rank makes the loss of this rank not finite. The all-reduce spreads the gradients,
so the losses of all ranks are lost one step later, and so are the parameters that would show which rank was the cause.
"""

import math
from collections import deque
from collections.abc import Sequence
from typing import Any

_MOST = 1024  # losses between two samples: with fewer steps the first lost one is known
_ABSURD = 1000.0  # times the usual loss
_ORDINARY = 10.0


class LossHistory:
    """The last losses of a rank, on their device. Adding one waits for no device and computes nothing."""

    __slots__ = ("_kind", "_losses", "_lost", "_torch")

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._kind = torch.Tensor
        self._losses: deque[tuple[float, Any]] = deque(maxlen=_MOST)
        self._lost = 0

    def add(self, step: float, root: Any) -> None:
        """Add the root of a backward, unless it is no scalar of its own: a view keeps all of its tensor in memory."""
        if type(root) is self._kind and not root.dim() and not root._is_view():
            self._losses.append((step, root.detach()))

    def stack(self) -> tuple[list[int], Any]:
        """Return the steps and the losses, as one tensor on their device; None without a loss."""
        if not self._losses:
            return [], None
        device = self._losses[-1][1].device
        known = [(int(step), loss) for step, loss in self._losses if loss.device == device]
        return [step for step, _ in known], self._torch.stack([loss for _, loss in known])

    def find_lost(self, steps: Sequence[int], losses: Sequence[float]) -> int:
        """Return the step since which the loss is lost: see ReplicaSample. ``losses``: those of the steps, in order."""
        if not losses or math.isfinite(losses[-1]):
            self._lost = 0
        elif not self._lost:
            self._lost = find_lost_step(steps, losses)
        return self._lost


def find_lost_step(steps: Sequence[int], losses: Sequence[float]) -> int:
    """Return the step since which all losses are not finite or absurd, negative if the one before had grown.

    0: the last loss is finite, or none is known from before the first one that was lost.
    """
    if math.isfinite(losses[-1]):
        return 0
    sizes = [abs(loss) if math.isfinite(loss) else math.inf for loss in losses]
    older = [size for size in sizes[: (len(sizes) + 1) // 2] if size < math.inf]
    usual = max(older, default=math.inf)
    first = len(sizes)
    while first and (sizes[first - 1] == math.inf or sizes[first - 1] > _ABSURD * usual):
        first -= 1
    if first == 0:
        return 0
    return steps[first] if sizes[first - 1] <= _ORDINARY * usual else -steps[first]
