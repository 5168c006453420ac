"""Text that every Python comes with: the reference that ``help("topics")`` shows, by its bytes."""

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ddp_trainer.data import DataConfig
from ddp_trainer.data.arrays import Datasets
from ddp_trainer.errors import UserError

LENGTH = 128


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """One window of ``LENGTH`` bytes after another, and for each of their bytes the next one: int64 (LENGTH,) both."""

    def __init__(self, text: bytes) -> None:
        self._bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def __len__(self) -> int:
        return (len(self._bytes) - 1) // LENGTH

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """The window ``index``."""
        part = self._bytes[index * LENGTH : (index + 1) * LENGTH + 1].long()
        return part[:-1], part[1:]


def load(config: DataConfig) -> Datasets:
    """Half a megabyte of English and Python, the last ``config.validation_fraction`` of it for validation.

    It differs a little from one minor version of Python to the next. Raises :class:`UserError` where it is left out.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise UserError(
            "data.name", "this Python comes without pydoc_data", "use another distribution of it"
        ) from error
    text = "\n".join(topics[name] for name in sorted(topics)).encode()
    cut = round(len(text) * (1.0 - config.validation_fraction))
    return Datasets(Windows(text[:cut]), Windows(text[cut:]), num_classes=256)
