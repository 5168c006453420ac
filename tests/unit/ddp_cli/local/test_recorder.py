"""How often the reports of a run on this machine are read."""

from __future__ import annotations

from ddp_cli.local.recorder import choose_pause


def test_young_run_is_read_often_and_an_old_one_once_a_second() -> None:
    assert [choose_pause(since, 100.0) for since in (None, 100.0, 50.0, 0.0)] == [0.1, 0.1, 0.5, 1.0]
