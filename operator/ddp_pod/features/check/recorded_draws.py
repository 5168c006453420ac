"""Record what draws random numbers in an iteration: the models, the data, or the script between them."""

import random
import sys
from collections.abc import Iterator
from typing import Any

from ...rank import fingerprint
from ...rank.script_objects import bypass_modes
from .contract import DATA_DRAWS


class DrawMeter:
    """Compares the states of the default generators at the borders of calls. It draws nothing."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._states: dict[str, int] = {}  # digest by generator
        self._drawn: dict[str, list[int]] = {}  # by source and generator: the digests before
        self._depth = 0  # of the calls that load data: their transforms may be modules

    def enter_data(self, source: str) -> None:
        """Note that data is loaded from here on. ``source``: what ran until now."""
        self.mark(source)
        self._depth += 1

    def leave_data(self) -> None:
        """Note that data was loaded until now."""
        self.mark(DATA_DRAWS)
        self._depth = max(0, self._depth - 1)

    def mark(self, source: str) -> None:
        """Attribute what was drawn since the last call to a source."""
        states = dict(self._read_states())
        for generator, state in states.items():
            before = self._states.get(generator, state)
            if before != state:
                self._drawn.setdefault(f"{DATA_DRAWS if self._depth else source} {generator}", []).append(before)
        self._states = states

    def take(self) -> tuple[str, ...]:
        """Return source, generator and digest of each draw since the last call."""
        drawn = tuple(f"{key}={fingerprint.combine(states):016x}" for key, states in sorted(self._drawn.items()))
        self._drawn = {}
        return drawn

    def _read_states(self) -> Iterator[tuple[str, int]]:
        with bypass_modes(self._torch):
            yield "torch", _hash(self._torch.random.default_generator.get_state())
            cuda = self._torch.cuda
            if cuda.is_available() and cuda.is_initialized():
                yield "cuda", _hash(cuda.default_generators[cuda.current_device()].get_state())
        numpy = sys.modules.get("numpy.random")
        if numpy is not None and hasattr(numpy, "get_state"):  # not while it is imported
            state = numpy.get_state(legacy=False)
            if state["bit_generator"] == "MT19937":
                key = state["state"]["key"].tobytes()
                yield "numpy", fingerprint.hash_bytes(key + str(state["state"]["pos"]).encode())
        yield "random", hash(random.getstate()[1])


def _hash(state: Any) -> int:
    return fingerprint.hash_bytes(state.numpy().tobytes())
