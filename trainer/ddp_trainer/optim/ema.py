"""An exponential moving average of the model, which is validated and saved instead of the model."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel


class Ema:
    """After every step ``average <- decay * average + (1 - decay) * value``, for parameters and buffers.

    The first update copies the model. After ``n`` updates the decay is ``(1 + n) / (10 + n)`` until it reaches
    ``decay``: otherwise the initial weights would dominate the average for about ``1 / (1 - decay)`` steps.

    Copy and state are those of :class:`torch.optim.swa_utils.AveragedModel`, and the arithmetic is equal to the bit.
    Its ``update_parameters`` is not used because on a GPU it synchronizes host and device in every step.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.updates = 0
        self._source = model
        self._averaged = AveragedModel(model, use_buffers=True)
        self._averaged.requires_grad_(False).eval()
        # Buffers are read by name in every step: a module may replace a buffer's tensor.
        self._buffers = [_locate_buffer(model, name) for name, _ in model.named_buffers()]
        # The averages by type, and their indices in the list of all parameters and buffers.
        self._averages: dict[torch.dtype, list[Tensor]] = {}
        self._indices: dict[torch.dtype, list[int]] = {}
        for index, average in enumerate([*self.model.parameters(), *self.model.buffers()]):
            self._averages.setdefault(average.dtype, []).append(average)
            self._indices.setdefault(average.dtype, []).append(index)
        self._parameters: list[Tensor] = list(model.parameters())

    @property
    def model(self) -> nn.Module:
        """Return the averaged model, in evaluation mode."""
        return self._averaged.module

    @torch.no_grad()
    def restart(self) -> None:
        """Restart the average from the current weights."""
        self.updates = 0
        self.model.load_state_dict(self._source.state_dict())

    @torch.no_grad()
    def update(self) -> None:
        """Update the average with the current model; does not wait for the device."""
        values = [*self._parameters, *(buffers[name] for buffers, name in self._buffers)]
        weight = 1.0 - min(self.decay, (1 + self.updates) / (10 + self.updates))
        for dtype, averages in self._averages.items():
            current = [values[index] for index in self._indices[dtype]]
            if self.updates and (dtype.is_floating_point or dtype.is_complex):
                torch._foreach_lerp_(averages, current, weight)
            else:  # integers are counts or indices, which have no meaningful average
                torch._foreach_copy_(averages, current)
        self.updates += 1

    def state_dict(self) -> dict[str, Any]:
        """Return ``AveragedModel``'s state, without copies: ``n_averaged``, and the model's under ``module.``."""
        self._averaged.n_averaged.fill_(self.updates)
        return dict(self._averaged.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a saved average; raises RuntimeError if names or shapes differ."""
        self._averaged.load_state_dict(state)
        self.updates = int(state["n_averaged"])


def _locate_buffer(model: nn.Module, name: str) -> tuple[dict[str, Any], str]:
    """Return the dictionary that holds the buffer ``name``, and its key there."""
    module, _, key = name.rpartition(".")
    return model.get_submodule(module)._buffers, key
