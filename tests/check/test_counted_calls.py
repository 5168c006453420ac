"""The hooks in a rank call no method of a script's objects: of modules, data, losses, optimizers or schedulers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from ddp_pod.contract.names import CHECK_VARIABLE
from ddp_pod.features.check.contract import ORDER_FILE
from tests.check.faults import SCRIPTS
from tests.check.running import SECONDS

pytestmark = pytest.mark.process

# Without an end of the interpreter, in which gloo's threads may abort the process (pytorch#190489).
ENDING: Final = """
import os, runpy, sys
runpy.run_path("counted.py", run_name="__main__")
sys.stdout.flush()
os._exit(0)
"""
PLAIN: Final = ("torch.distributed.run", "--standalone", "--nproc-per-node=2", "plain.py")
HOOKED: Final = ("ddp_cli", "run", "--cpu", "--nodes=2", "--quiet", "--plain", "counted.py")
DIRECT: Final = "by the hooks: "
# PyTorch's own calls of len() pass through a hook, which notes the results.
PASSED_ON: Final = f"{DIRECT}dataset __len__"
# With a hook for all modules, PyTorch itself reads more attributes of each.
READ_BY_PYTORCH: Final = ("module __getattribute__", "metric __getattribute__")


def count_calls(folder: Path, *command: str, records: Path | None = None) -> list[dict[str, int]]:
    """Return the calls that the objects of each rank have counted. ``records``: of `ddp check`."""
    folder.mkdir()
    for name in ("common.py", "counted.py"):
        shutil.copy(SCRIPTS / name, folder)
    (folder / "plain.py").write_text(ENDING)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", "EPOCHS": "2"}
    environment.pop("VIRTUAL_ENV", None)
    if records is not None:
        environment[CHECK_VARIABLE] = str(records)
    ran = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return [json.loads((folder / f"counts-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.timeout(3 * SECONDS)
def test_objects_are_called_as_often_with_hooks_as_without(tmp_path: Path) -> None:
    records = tmp_path / "records"
    records.mkdir()
    (records / ORDER_FILE).write_text("{}")

    plain = count_calls(tmp_path / "plain", *PLAIN)
    hooked = count_calls(tmp_path / "hooked", *HOOKED)
    recorded = count_calls(tmp_path / "recorded", *HOOKED, records=records)

    assert [path.name for path in sorted(records.glob("*.jsonl"))] == ["0.0.jsonl", "1.0.jsonl"]
    for rank, expected in enumerate(plain):
        for counts in (hooked[rank], recorded[rank]):
            assert not [name for name in counts if name.startswith(DIRECT) and name != PASSED_ON]
            different = {name for name in {*counts, *expected} if counts.get(name) != expected.get(name)}
            assert different <= {*READ_BY_PYTORCH, PASSED_ON}
