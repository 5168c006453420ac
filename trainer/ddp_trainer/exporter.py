"""The former path of :mod:`ddp_sdk.exporter`, until version 0.3."""

import warnings

from ddp_sdk import Exporter

__all__ = ["Exporter"]

warnings.warn(
    "ddp_trainer.exporter is deprecated, and version 0.3 removes it: use `from ddp_sdk import Exporter`",
    DeprecationWarning,
    stacklevel=2,
)
