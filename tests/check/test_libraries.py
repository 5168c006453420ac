"""`ddp check` on training loops of libraries, and on scripts of other projects: it reports what is wrong, no more.

``DDP_TEST_LIBRARIES_PYTHON`` names the interpreter of an environment with lightning, transformers and accelerate beside
the operator's dependencies, by default this one. ``DDP_TEST_OTHER_PROJECTS`` names a folder with checkouts of
pytorch/examples (``examples``) and karpathy/nanoGPT (``nanoGPT``). Their scripts require CUDA: ``scripts/on_cpu.py``
runs the unchanged files.
"""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import numpy
import pytest

from tests.check.faults import SCRIPTS
from tests.check.running import list_failures, run_check
from tests.support import ROOT

pytestmark = pytest.mark.process

PYTHON = os.environ.get("DDP_TEST_LIBRARIES_PYTHON", sys.executable)
PATHS = os.pathsep.join(str(ROOT / name) for name in ("operator", "trainer"))
NANO_GPT = (
    "--device=cpu --backend=gloo --compile=False --dtype=float32 --dataset=letters --n_layer=1 --n_head=2 --n_embd=32 "
    "--block_size=32 --batch_size=4 --gradient_accumulation_steps=4 --max_iters=60 --lr_decay_iters=60 "
    "--warmup_iters=5 --eval_interval=5 --eval_iters=1"
)


@pytest.mark.parametrize("library", ["lightning", "transformers", "accelerate"])
def test_right_script_of_library_has_no_failed_check(library: str, tmp_path: Path) -> None:
    code = f"import {library}, ddp_cli.commands"
    ran = subprocess.run([PYTHON, "-c", code], env=os.environ | {"PYTHONPATH": PATHS}, capture_output=True, check=False)
    if ran.returncode != 0:
        pytest.skip(f"{PYTHON} has no {library} beside ddp's packages; set DDP_TEST_LIBRARIES_PYTHON to one that has")
    for name in ("common.py", f"with_{library}.py"):
        shutil.copy(SCRIPTS / name, tmp_path)

    verdicts = run_check(tmp_path, f"with_{library}.py", python=PYTHON, paths=PATHS)

    assert list_failures(verdicts) == {}
    assert verdicts["resumes exactly"]["state"] == "passed"


def test_nano_gpt_is_reported_to_draw_other_batches_after_a_restart_only(tmp_path: Path) -> None:
    copy_nano_gpt(tmp_path)

    verdicts = run_check(tmp_path, "on_cpu.py", "--", "train.py", *NANO_GPT.split())

    # It resumes only with another argument, and draws its batches from an unsaved generator.
    assert set(list_failures(verdicts)) == {"resumes exactly"}


def test_script_of_tutorial_series_is_reported_for_its_checkpoints_only(tmp_path: Path) -> None:
    names = ["multigpu_torchrun.py", "datautils.py"]
    copy_project("examples", "distributed/ddp-tutorial-series", names, tmp_path)

    verdicts = run_check(tmp_path, "on_cpu.py", "--", "multigpu_torchrun.py", "5", "1")

    # Each node's first rank saves, so the check of resumes waits for its repair.
    assert set(list_failures(verdicts)) == {"one writer"}


def copy_nano_gpt(target: Path) -> None:
    """Copy the scripts of nanoGPT, and write random letters for them."""
    copy_project("nanoGPT", "", ["train.py", "model.py", "configurator.py"], target)
    folder = target / "data" / "letters"
    folder.mkdir(parents=True)
    letters = numpy.random.default_rng(0).integers(0, 64, 4000).astype(numpy.uint16)
    letters.tofile(folder / "train.bin")
    letters.tofile(folder / "val.bin")
    (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 64}))


def copy_project(project: str, folder: str, names: list[str], target: Path) -> None:
    """Copy scripts of a project, and what runs them on CPUs."""
    projects = os.environ.get("DDP_TEST_OTHER_PROJECTS")
    if not projects:
        pytest.skip(f"no checkout of {project}; set DDP_TEST_OTHER_PROJECTS to the folder that has it")
    for path in [SCRIPTS / "on_cpu.py", *(Path(projects, project, folder, name) for name in names)]:
        shutil.copy(path, target)
