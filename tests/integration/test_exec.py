"""`ddp exec` in the pods of a run: the environment of a rank, of one that is forked and of one that is a program."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import PATIENCE
from tests.support.ddp_run import DdpRun, manifest

pytestmark = pytest.mark.process

NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OWN")
REPORT = f"""
import json, os, sys
names = {NAMES!r}
paths = [path for path in sys.path if not path.endswith("site/0") and not path.endswith("site/1")]  # the shim's
print(json.dumps([os.getcwd(), paths, *(os.environ[name] for name in names)]))
"""
WAIT = """
import pathlib, time
pathlib.Path("rank-" + __import__("os").environ["RANK"]).write_text(REPORT)
time.sleep(600)
""".replace(
    "REPORT", f"__import__('subprocess').check_output([__import__('sys').executable, '-c', {REPORT!r}], text=True)"
)


def execute(run: DdpRun, *words: str) -> subprocess.CompletedProcess[str]:
    """Run `ddp exec` beside a run."""
    code = "import sys; from ddp_cli.__main__ import main; sys.exit(main())"
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code, "exec", "--local", *words]
    return subprocess.run(
        command, cwd=run.folder, env=environ, input="", capture_output=True, text=True, timeout=PATIENCE, check=False
    )


@pytest.mark.parametrize("warm_start", ["Off", "Auto"])
def test_command_has_environment_and_folder_of_rank(tmp_path: Path, warm_start: str) -> None:
    recovery = {"inPlaceRestarts": 0, "maxRestarts": 0, "warmStart": warm_start}
    text = manifest(["python3", "-c", WAIT], env={"OWN": "of the job"}, procPerNode=2, recovery=recovery)
    with DdpRun(tmp_path, text, ("--quiet",)) as run:
        run.until(lambda: len(list(tmp_path.glob("rank-*"))) == 4, "four ranks")
        for rank in (0, 3):
            run.until((tmp_path / f"rank-{rank}").read_text, "its environment")
            result = execute(run, "toy", "--rank", str(rank), "--", "python3", "-c", REPORT)
            assert json.loads(result.stdout) == json.loads((tmp_path / f"rank-{rank}").read_text()), result.stderr
        result = execute(run, "--", "sh", "-c", "env; exit 7")
        assert result.returncode == 7
        assert "SECRET" not in result.stdout
        result = execute(run, "--rank", "4", "--", "true")
        assert (result.returncode, "pod 2 does not run" in result.stderr) == (1, True)
