"""The recipes of docs/recipes.md with their libraries: `ddp run`, and `ddp check`, which kills and resumes them.

``DDP_TEST_<NAME>_PYTHON`` names the interpreter of an environment with the library beside the operator's dependencies;
``DDP_TEST_LIBRARIES_PYTHON`` that of one with several, by default this one. nanoGPT comes from the folder in
``DDP_TEST_OTHER_PROJECTS`` (test_libraries.py). The recipe of torchtitan has no test: torchtitan needs GPUs.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from tests.check.running import SECONDS, list_failures, run_check
from tests.check.test_libraries import NANO_GPT, copy_nano_gpt, copy_project
from tests.support import ROOT

pytestmark = [pytest.mark.process, pytest.mark.nightly, pytest.mark.timeout(3 * SECONDS)]

RUN_DDP: Final = "import sys; from ddp_cli.__main__ import main; sys.exit(main())"
RECIPES: Final = ROOT / "deploy" / "samples" / "recipes"
PATHS: Final = os.pathsep.join(str(ROOT / name) for name in ("operator", "trainer"))
PIXELS: Final = 32
CLASSES: Final = ("cat", "dog")


class Recipe(NamedTuple):
    """A recipe. ``imports``: what its environment must have; ``arguments``: of its script."""

    name: str
    imports: str
    arguments: Sequence[str] = ()


SMALL: Final = (f"--size={PIXELS}", "--batch-size=4", "--workers=0", "--epochs=4")
RUN: Final = (
    Recipe("lightning", "lightning, torchmetrics"),
    Recipe("transformers", "transformers, accelerate"),
    Recipe("accelerate", "accelerate"),
    Recipe("timm", "timm, PIL", ("images", *SMALL)),
)
OFFLINE: Final = {"HF_HUB_OFFLINE": "1"}
MAKE_MODEL_AND_TEXTS: Final = """
import json
from pathlib import Path
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

special = ["<unk>", "<pad>", "<eos>"]
texts = [f"the square of {number} is {number * number}" for number in range(160)]
words = Tokenizer(models.BPE(unk_token="<unk>"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
words.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=256, special_tokens=special))
tokens = dict(zip(("unk_token", "pad_token", "eos_token"), special))
PreTrainedTokenizerFast(tokenizer_object=words, **tokens).save_pretrained("model")
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
config = Qwen3Config(vocab_size=256, pad_token_id=1, eos_token_id=2, **sizes, **heads)
Qwen3ForCausalLM(config).save_pretrained("model")
Path("texts").mkdir()
Path("texts/train.jsonl").write_text("".join(json.dumps({"text": text}) + chr(10) for text in texts))
"""
recipes = pytest.mark.parametrize("recipe", RUN, ids=[recipe.name for recipe in RUN])


def find_python(recipe: Recipe) -> str:
    """Return the interpreter that has the recipe's library; skip without one."""
    variable = f"DDP_TEST_{recipe.name.upper()}_PYTHON"
    python = os.environ.get(variable) or os.environ.get("DDP_TEST_LIBRARIES_PYTHON", sys.executable)
    code = f"import ddp_cli.commands, {recipe.imports}"
    ran = subprocess.run([python, "-c", code], env=os.environ | {"PYTHONPATH": PATHS}, capture_output=True, check=False)
    if ran.returncode != 0:
        pytest.skip(f"{python} has no {recipe.imports} beside ddp's packages; set {variable} to one that has")
    return python


def lay_out(recipe: Recipe, folder: Path) -> None:
    """Copy a recipe, and write images for the one that reads them."""
    shutil.copytree(RECIPES / recipe.name, folder, dirs_exist_ok=True)
    if "images" in recipe.arguments:
        from PIL import Image

        for number in range(32):
            path = folder / "images" / "train" / CLASSES[number % 2] / f"{number}.JPEG"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (PIXELS, PIXELS), (8 * number, 255 - 8 * number, 90)).save(path)


@recipes
def test_recipe_trains(recipe: Recipe, tmp_path: Path) -> None:
    python = find_python(recipe)
    lay_out(recipe, tmp_path)
    options = ["run", "--cpu", "--nodes=2", "--plain", "train.py", "--", *recipe.arguments]

    ran = subprocess.run(
        [python, "-c", RUN_DDP, *options],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": PATHS},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )

    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "Succeeded" in ran.stdout


@recipes
def test_killed_recipe_resumes_exactly(recipe: Recipe, tmp_path: Path) -> None:
    python = find_python(recipe)
    lay_out(recipe, tmp_path)

    verdicts = run_check(tmp_path, "train.py", "--", *recipe.arguments, python=python, paths=PATHS)

    assert list_failures(verdicts) == {}
    assert verdicts["resumes exactly"]["state"] == "passed", verdicts["resumes exactly"]


def test_killed_nanogpt_resumes(tmp_path: Path) -> None:
    copy_nano_gpt(tmp_path)
    copy_project("nanoGPT", "", ["config/train_gpt2.py"], tmp_path)
    (tmp_path / "config").mkdir()
    (tmp_path / "train_gpt2.py").rename(tmp_path / "config" / "train_gpt2.py")
    job = (RECIPES / "nanogpt" / "job.yaml").read_text(encoding="utf-8")
    (tmp_path / "job.yaml").write_text(job.replace("exec python train.py", "exec python on_cpu.py train.py"))
    options = ["job.yaml", "--workdir=.", "--", *NANO_GPT.split(), "--always_save_checkpoint=True"]

    output = run_killed(sys.executable, options, tmp_path, checkpoint="nanogpt-checkpoints/ckpt.pt")

    assert "Resuming training from" in output


def test_killed_trl_resumes(tmp_path: Path) -> None:
    python = find_python(Recipe("trl", "trl, tokenizers"))
    make = [python, "-c", MAKE_MODEL_AND_TEXTS]
    subprocess.run(make, cwd=tmp_path, env=os.environ | OFFLINE, capture_output=True, text=True, check=True)
    job = (RECIPES.parent / "trl-sft.yaml").read_text(encoding="utf-8")
    (tmp_path / "job.yaml").write_text(job, encoding="utf-8")
    of_script = ["--use_cpu", "--model_name_or_path=model", "--dataset_name=texts", "--bf16=False", "--max_steps=12"]
    options = ["job.yaml", "--workdir=.", "--", *of_script, "--save_steps=4", "--per_device_train_batch_size=2"]

    output = run_killed(python, options, tmp_path, checkpoint="sft-checkpoints/checkpoint-*/trainer_state.json")

    states = [
        json.loads(path.read_text())
        for path in find_written(tmp_path, "sft-checkpoints/checkpoint-12/trainer_state.json")
    ]
    assert [state["global_step"] for state in states] == [12], output


def run_killed(python: str, options: Sequence[str], folder: Path, *, checkpoint: str) -> str:
    """Run a job of two pods, kill rank 1 once a checkpoint exists in a claim, and return the output.

    ``checkpoint``: the pattern of its name below the folder of the claims.
    """
    ddp = [python, "-c", RUN_DDP]
    env = os.environ | OFFLINE | {"PYTHONPATH": PATHS, "HF_HOME": str(folder / "huggingface")}
    line = [*ddp, "run", "--cpu", "--plain", "--nodes=2", "--max-restarts=2", *options]
    with subprocess.Popen(
        line, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        while not find_written(folder, checkpoint) and process.poll() is None:
            time.sleep(0.1)
        if process.poll() is not None:
            raise AssertionError(process.communicate()[0])
        drill = [*ddp, "drill", "--local", "--kill=1", "--after=0"]
        killed = subprocess.run(
            drill, cwd=folder, env=env, capture_output=True, text=True, timeout=SECONDS, check=False
        )
        output, _ = process.communicate(timeout=SECONDS)

    assert killed.returncode == 0, killed.stdout + killed.stderr
    assert process.returncode == 0, output
    return output


def find_written(folder: Path, pattern: str) -> list[Path]:
    """Return the files of a run's claims that match a pattern."""
    return sorted((folder / "ddp-runs" / "claims").glob(pattern))
