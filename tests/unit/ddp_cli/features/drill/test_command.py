"""`ddp drill` without a job: when it kills, what it measures, and the probe that pods run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddp_cli.commands.io import CommandError
from ddp_cli.features.drill import probe
from ddp_cli.features.drill.command import DrillResult, drill, print_result
from ddp_cli.features.drill.pods import RunEnded, build_probe_command
from ddp_cli.features.drill.recovery import MeasuredRecovery, Sample


class FakeTarget:
    """A job with given samples, up to its last phase; ``killed`` is the rank that was killed."""

    summary = "its summary above"

    def __init__(self, *samples: Sample, end: str = "") -> None:
        self._samples = samples
        self._end = end
        self.killed: int | None = None

    def samples(self) -> Iterator[Sample]:
        yield from self._samples
        if self._end:
            raise RunEnded(self._end)

    def check_rank(self, rank: int) -> None:
        """Accept every rank."""

    def kill(self, rank: int) -> str:
        self.killed = rank
        return f"rank {rank}"


class TestDrill:
    def test_drill_waits_for_steps_kills_and_measures(self) -> None:
        early = Sample(1, 1, 1, 1, 0)
        ready = Sample(2, 1, 5, 5, 0)
        back = Sample(9, 1, 5, 1, 1)
        target = FakeTarget(early, ready, back)
        rank, result = drill(target, 1, after=3, timeout=60, clock=lambda: 3.0)
        assert (rank, target.killed, result.seconds, result.steps_lost) == ("rank 1", 1, 6.0, 1)

    @pytest.mark.parametrize(
        ("samples", "end", "message"),
        [
            ([Sample(1, 1, 0, 0, 0), Sample(500, 1, 0, 0, 0)], "", "has not completed 3 steps"),
            ([Sample(1, 1, 2, 2, 0)], "Succeeded", r"succeeded before rank 0 completed 3 steps, .*--after"),
            ([Sample(1, 1, 2, 2, 0)], "Failed", r"ended \(Failed\) before the kill; see its summary above"),
            (
                [Sample(2, 1, 5, 5, 0), Sample(100, 1, 5, 1, 1)],
                "",
                "killed rank 0; training did not resume within 60 s",
            ),
            ([Sample(2, 1, 5, 5, 0)], "Succeeded", "killed rank 0; the job succeeded before it reported a step"),
            ([Sample(2, 1, 5, 5, 0)], "Failed", r"killed rank 0; the job did not recover and ended \(Failed\)"),
        ],
    )
    def test_drill_without_result_names_reason_and_remedy(self, samples: list[Sample], end: str, message: str) -> None:
        target = FakeTarget(*samples, end=end)
        with pytest.raises(CommandError, match=message):
            drill(target, 0, after=3, timeout=60, clock=lambda: 3.0)
        assert (target.killed is None) is ("killed" not in message)

    def test_job_without_checkpoints_has_lost_all_steps(self, capsys: pytest.CaptureFixture[str]) -> None:
        """A script that logs every 20th step: the new process reports step 20 first, as the killed one did."""
        target = FakeTarget(
            Sample(1, 1, 20, 1, 0, interval=20),
            Sample(2, 1, 560, 541, 0, interval=20),
            Sample(9, 1, 20, 1, 1, interval=20),
        )
        result = drill(target, 1, after=500, timeout=60, clock=lambda: 3.0)
        print_result(result, "text")
        lines = capsys.readouterr().out.splitlines()
        assert lines[2] == "steps lost  all 560 (at step 560, restarted at step 0)"
        assert lines[3].startswith("verdict     restarted at step 0: no checkpoint was loaded.")

    def test_steps_from_log_are_lost_within_its_interval(self, capsys: pytest.CaptureFixture[str]) -> None:
        measured_recovery = MeasuredRecovery(1.0, "process", 240, 219, began_at=19, interval=20)
        print_result(DrillResult("rank 1", measured_recovery), "text")
        lines = capsys.readouterr().out.splitlines()
        assert lines[2] == (
            "steps lost  at most 40 (at step 240, resumed between 200 and 220: the log has every 20th step)"
        )
        assert lines[3] == "verdict     recovered"


class TestProbe:
    def test_process_of_rank_is_found_by_its_record(self, tmp_path: Path) -> None:
        """A DataLoader worker inherits the environment, and of a forked rank no other process sees RANK."""
        inner = "import time; time.sleep(600)"
        code = (
            f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {inner!r}]); print(p.pid, flush=True)"
        )
        worker = [sys.executable, "-c", f"{code}; p.wait()"]
        env = os.environ | {"DDP_RUNTIME_DIR": str(tmp_path)}
        (tmp_path / "workers").mkdir()
        with subprocess.Popen(worker, env=env, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            child = int(process.stdout.readline())
            assert probe.find_worker(7) == 0
            for local_rank, pid in enumerate((1 << 22, process.pid), 6):
                about = {"pid": pid, "rank": local_rank, "localRank": local_rank}
                (tmp_path / "workers" / f"{local_rank}.json").write_text(json.dumps(about))
            try:
                assert probe.find_worker(7, str(tmp_path)) == probe.find_worker(7, str(tmp_path.parent)) == process.pid
                assert probe.find_worker(7, f"{tmp_path}-2") == 0
                assert probe.find_worker(8, str(tmp_path)) == 0
                assert probe.kill(7) == process.pid
                assert process.wait(300) == -9
            finally:
                process.kill()
                os.kill(child, 9)

    def test_probe_is_one_file_of_standard_library(self) -> None:
        line = build_probe_command("kill", "123456")
        line[0] = sys.executable
        done = subprocess.run([line[0], "-I", *line[1:]], capture_output=True, text=True, timeout=300)
        assert (json.loads(done.stdout), done.stderr) == ({"killed": 0}, "")
