"""An exponential moving average of the model, which validates and is saved in its place."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from ddp_trainer.errors import UserError


class Ema:
    """After every step ``average <- decay * average + (1 - decay) * value``, for parameters and buffers alike.

    The first update copies the model. After ``n`` updates the decay is ``(1 + n) / (10 + n)`` until that reaches
    ``decay``: early averages would otherwise be made of the initial weights for about ``1 / (1 - decay)`` steps.

    Copy and state are those of :class:`torch.optim.swa_utils.AveragedModel`. Its ``update_parameters`` is not used: on
    a GPU that waits for the device in every step. The arithmetic is the same, to the bit.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.updates = 0
        self._source = model
        self._averaged = AveragedModel(model, use_buffers=True)
        self._averaged.requires_grad_(False).eval()
        # Buffers are looked up in every step: a module may put another tensor in a buffer's place.
        self._buffers = [_owner(model, name) for name, _ in model.named_buffers()]
        averages = [*self.model.parameters(), *self.model.buffers()]
        self._averages: dict[torch.dtype, list[Tensor]] = {}
        self._places: dict[torch.dtype, list[int]] = {}
        for place, average in enumerate(averages):
            self._averages.setdefault(average.dtype, []).append(average)
            self._places.setdefault(average.dtype, []).append(place)
        self._parameters: list[Tensor] = list(model.parameters())

    @property
    def model(self) -> nn.Module:
        """The averaged model, in evaluation mode."""
        return self._averaged.module

    @torch.no_grad()
    def restart(self) -> None:
        """Begin anew at the weights as they are now."""
        self.updates = 0
        self.model.load_state_dict(self._source.state_dict())

    @torch.no_grad()
    def update(self) -> None:
        """Take in the model as it is now; does not wait for the device."""
        values = [*self._parameters, *(buffers[name] for buffers, name in self._buffers)]
        weight = 1.0 - min(self.decay, (1 + self.updates) / (10 + self.updates))
        for dtype, averages in self._averages.items():
            mine = [values[place] for place in self._places[dtype]]
            if self.updates and (dtype.is_floating_point or dtype.is_complex):
                torch._foreach_lerp_(averages, mine, weight)
            else:  # Whole numbers are counts or indices, of which an average means nothing.
                torch._foreach_copy_(averages, mine)
        self.updates += 1

    def state_dict(self) -> dict[str, Any]:
        """``AveragedModel``'s: ``n_averaged``, and the model's under ``module.``. The tensors are the live ones."""
        self._averaged.n_averaged.fill_(self.updates)
        return dict(self._averaged.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a saved average; raises RuntimeError where names or shapes don't fit.

        Raises :class:`UserError` for one that an earlier version saved, of the parameters alone.
        """
        if "n_averaged" not in state:
            raise UserError(
                "optim.ema_decay",
                "the checkpoint's average of the weights was saved by an earlier version, which left the buffers out",
                "go on without --ema-decay, or train into another --checkpoint-dir",
            )
        self._averaged.load_state_dict(state)
        self.updates = int(state["n_averaged"])


def _owner(model: nn.Module, name: str) -> tuple[dict[str, Any], str]:
    """The dictionary that holds the buffer ``name``, and its key there."""
    module, _, key = name.rpartition(".")
    return model.get_submodule(module)._buffers, key
