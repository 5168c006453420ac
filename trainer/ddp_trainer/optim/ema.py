"""An exponential moving average of the weights, which validates and is saved in their place."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn


class Ema:
    """After every step ``average <- decay * average + (1 - decay) * weight`` (Polyak averaging with forgetting).

    Only parameters are averaged; batch-norm statistics are averages already.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self._names = [name for name, _ in model.named_parameters()]
        self._weights: list[Tensor] = [parameter for _, parameter in model.named_parameters()]
        self.restart()

    @torch.no_grad()
    def restart(self) -> None:
        """Begin anew at the weights as they are now."""
        self._averages = [weight.detach().clone() for weight in self._weights]

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights as they are now; does not wait for the device."""
        torch._foreach_lerp_(self._averages, self._weights, 1.0 - self.decay)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """The model has the averages for weights inside the block, and its own again after it."""
        own = [weight.detach().clone() for weight in self._weights]
        with torch.no_grad():
            torch._foreach_copy_(self._weights, self._averages)
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(self._weights, own)

    def state_dict(self) -> dict[str, Any]:
        """The averages by the parameters' names. The tensors are the live ones."""
        return dict(zip(self._names, self._averages, strict=True))

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up saved averages; raises KeyError or RuntimeError where names or shapes don't fit."""
        for name, average in zip(self._names, self._averages, strict=True):
            average.copy_(state[name])
