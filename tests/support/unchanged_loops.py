"""The loops of ``training_loops.py`` with what a run of each shows, on this machine and in a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

LOOPS: Final = Path(__file__).with_name("training_loops.py")


class UnchangedLoop(NamedTuple):
    """A loop, its options, the steps that it makes, and whether the output tells their total."""

    loop: str
    options: list[str]
    steps: int
    has_total: bool


UNCHANGED_LOOPS: Final = [
    UnchangedLoop("cnn", ["--epochs=2"], 120, True),
    UnchangedLoop("tutorial", [], 120, True),
    UnchangedLoop("nano_gpt", ["--max_steps=120"], 120, True),
    UnchangedLoop("gan", [], 120, True),
    UnchangedLoop("lbfgs", [], 120, True),
    UnchangedLoop("fsdp", ["--epochs=3"], 180, True),
    UnchangedLoop("dots", [], 120, False),
    UnchangedLoop("bars", ["--epochs=2"], 120, True),
    UnchangedLoop("records", [], 120, True),
    UnchangedLoop("lines_of_json", ["--max_steps", "120"], 120, True),
]
