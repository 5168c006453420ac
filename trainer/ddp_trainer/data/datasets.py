"""The dataset that the settings name."""

from ddp_sdk.errors import UserError
from ddp_trainer.data import DATASETS, DataConfig
from ddp_trainer.data.arrays import Datasets
from ddp_trainer.imports import load_callable


def load_datasets(config: DataConfig) -> Datasets:
    """Load the training and validation data into memory, or open large ones for reading.

    A user's ``module:function`` is called with ``config`` and returns :class:`ddp_trainer.data.arrays.Datasets`.
    Raises :class:`UserError` if files are missing or unreadable.
    """
    datasets = load_callable(DATASETS.get(config.name, config.name), "data.name")(config)
    if not isinstance(datasets, Datasets):
        raise UserError(
            "data.name", f"{config.name} returned {type(datasets).__name__}", "return ddp_trainer.data.arrays.Datasets"
        )
    return datasets
