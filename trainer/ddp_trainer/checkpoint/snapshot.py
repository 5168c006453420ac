"""Copies of a state that the step loop need not wait for."""

import hashlib
from functools import partial
from typing import IO, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only


class Snapshot:
    """A state as it was when this was made.

    Tensors on a GPU are first copied there, which the device does in its turn while the host goes on; the way to the
    host's memory is taken by whoever calls :meth:`to_cpu`. It costs the size of the state in device memory for a while.
    Where that is not to be had, the copy goes to the host at once.
    """

    def __init__(self, state: dict[str, Any]) -> None:
        devices: set[torch.device] = set()

        def clone(tensor: Tensor) -> Tensor:
            if tensor.is_cuda:
                devices.add(tensor.device)
            return tensor.detach().clone()

        try:
            self._state = tree_map_only(Tensor, clone, state)
        except torch.OutOfMemoryError:
            devices.clear()
            self._state = tree_map_only(Tensor, lambda tensor: tensor.detach().to("cpu", copy=True), state)
        self._copied = []
        for device in devices:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(device))
            self._copied.append((device, event))

    def to_cpu(self) -> dict[str, Any]:
        """The state with every tensor on the CPU. Call it once, from any thread; the device memory is given back."""
        for device, event in self._copied:
            # A stream of its own: the copy runs beside the next steps instead of between them.
            stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            with torch.cuda.stream(stream):
                event.wait(stream)
                self._state = tree_map_only(Tensor, partial(_fetch, device), self._state)
            stream.synchronize()
        self._copied = []
        state: dict[str, Any] = self._state
        return state


def _fetch(device: torch.device, tensor: Tensor) -> Tensor:
    return tensor.to("cpu") if tensor.device == device else tensor


class HashingFile:
    """A file to write to that takes the checksum on the way, so that the data is not read again."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.digest = hashlib.sha256()
        self.size = 0
        # torch.save puts words of its own in the place of this.
        self.failure: OSError | None = None

    def write(self, data: Any) -> int:
        """Write ``data`` and count it."""
        self.digest.update(data)
        try:
            written = self._file.write(data)
        except OSError as error:
            self.failure = error
            raise
        self.size += written
        return written

    def flush(self) -> None:
        """Pass on what is buffered."""
        self._file.flush()
