"""The text of Python's language reference, as ``help("topics")`` shows it, as bytes."""

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ddp_sdk.errors import UserError
from ddp_trainer.data import DataConfig
from ddp_trainer.data.arrays import Datasets

LENGTH = 128


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Consecutive windows of ``LENGTH`` bytes, and the byte that follows each of their bytes: both int64 (LENGTH,)."""

    def __init__(self, text: bytes) -> None:
        self._bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def __len__(self) -> int:
        return (len(self._bytes) - 1) // LENGTH

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return the window ``index``."""
        part = self._bytes[index * LENGTH : (index + 1) * LENGTH + 1].long()
        return part[:-1], part[1:]


def load(config: DataConfig) -> Datasets:
    """Load half a megabyte of English and Python; its last ``config.validation_fraction`` is for validation.

    The text differs slightly between minor versions of Python. Raises :class:`UserError` if Python lacks it.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise UserError(
            "data.name", "this Python has no module pydoc_data", "use another distribution of Python"
        ) from error
    text = "\n".join(topics[name] for name in sorted(topics)).encode()
    cut = round(len(text) * (1.0 - config.validation_fraction))
    return Datasets(Windows(text[:cut]), Windows(text[cut:]), num_classes=256)
