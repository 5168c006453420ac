"""The purposes of GPU-seconds, as commands and metrics sum them up. Pure."""

from typing import Final

from ddp_operator.api.status import Usage

PRODUCTIVE: Final = "Productive"
WAITING: Final = "Waiting"


def list_purposes(usage: Usage | None) -> dict[str, int]:
    """Return the GPU-seconds by purpose: Productive, Waiting and the causes of losses."""
    if usage is None:
        return {}
    lost = {item.cause: item.gpu_seconds for item in usage.lost}
    return {PRODUCTIVE: usage.productive, WAITING: usage.waiting, **lost}
