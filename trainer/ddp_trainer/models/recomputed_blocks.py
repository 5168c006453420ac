"""Gradient checkpointing: blocks of a network keep only their inputs for the backward pass, which recomputes the rest.

After Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016), by ``torch.utils.checkpoint``. Gradients are
equal to the bit: dropout draws the same numbers again, and batch norm does not update its running statistics twice.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.checkpoint import checkpoint


class RecomputedBlock(nn.Module):
    """A block that is computed again in the backward pass. Without gradients, and in evaluation, it is computed once.

    :func:`recompute_blocks` puts this class before the block's own.
    """

    def forward(self, *inputs: Any) -> Any:
        """Compute the block's own forward pass."""
        forward = super().forward
        if not (self.training and torch.is_grad_enabled()):
            return forward(*inputs)
        return checkpoint(
            forward,
            *inputs,
            use_reentrant=False,
            preserve_rng_state=_draws_numbers(self),
            context_fn=lambda: (contextlib.nullcontext(), _keep_statistics(self)),
        )


def recompute_blocks(model: nn.Module, *kinds: type[nn.Module]) -> None:
    """Make the modules of ``kinds`` in ``model`` recomputed blocks; parameters stay the same objects."""
    for module in model.modules():
        if isinstance(module, kinds) and not isinstance(module, RecomputedBlock):
            module.__class__ = _derive_recomputed(type(module))  # type: ignore[arg-type]


@functools.cache
def _derive_recomputed(kind: type[nn.Module]) -> type[nn.Module]:
    return type(f"Recomputed{kind.__name__}", (RecomputedBlock, kind), {})


def _draws_numbers(block: nn.Module) -> bool:
    """Return whether the block has dropout, for which the generators' states are kept."""
    return any(isinstance(module, _DropoutNd) and module.p > 0 for module in block.modules())


@contextlib.contextmanager
def _keep_statistics(block: nn.Module) -> Iterator[None]:
    """Within the context the batch norms of ``block`` keep their running statistics.

    They still read them: the recomputation must save the same tensors as the first forward pass.
    """
    norms = [module for module in block.modules() if isinstance(module, _BatchNorm)]
    saved = [(norm, norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        norm.momentum = 0.0
        norm.num_batches_tracked = None
    try:
        yield
    finally:
        for norm, momentum, batches in saved:
            norm.momentum = momentum
            norm.num_batches_tracked = batches
