"""TRL's own fine-tuning script under ``ddp run``: the sample, on a tiny model and data set of this test.

``DDP_TEST_TRL_PYTHON`` names the interpreter of an environment with TRL and the operator's dependencies, by default
this one. The operator's code is that of this repository.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support import ROOT
from tests.support.ddp_run import DdpRun

pytestmark = [pytest.mark.process, pytest.mark.nightly]

SAMPLE = (ROOT / "deploy" / "samples" / "trl-sft.yaml").read_text(encoding="utf-8")
PYTHON = os.environ.get("DDP_TEST_TRL_PYTHON", sys.executable)
PATHS = os.pathsep.join(str(ROOT / name) for name in ("operator", "trainer"))
# The arguments of a run on two CPUs.
SMALL = ["--per_device_train_batch_size=4", "--max_length=64", "--use_cpu=true", "--bf16=false", "--logging_steps=1"]
TINY_MODEL = """
import sys
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
letters = sorted(pre_tokenizers.ByteLevel.alphabet())
vocabulary = {letter: number for number, letter in enumerate([*letters, "<eos>"])}
tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>").save_pretrained(sys.argv[1])
LlamaForCausalLM(LlamaConfig(
    vocab_size=len(vocabulary), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
    max_position_embeddings=128, eos_token_id=256, pad_token_id=256,
)).save_pretrained(sys.argv[1])
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model in ``model`` and texts in ``texts``."""
    found = subprocess.run(
        [PYTHON, "-c", "import trl, ddp_cli.commands"], env=clean_environment(), capture_output=True, check=False
    )
    if found.returncode != 0:
        pytest.skip(f"{PYTHON} has no TRL beside the operator's packages; set DDP_TEST_TRL_PYTHON to one that has both")
    folder = tmp_path_factory.mktemp("tiny")
    subprocess.run([PYTHON, "-c", TINY_MODEL, str(folder / "model")], env=clean_environment(), check=True)
    (folder / "texts").mkdir()
    texts = [json.dumps({"text": f"{number} and {number + 1} are {2 * number + 1}"}) for number in range(64)]
    (folder / "texts" / "train.jsonl").write_text("\n".join(texts) + "\n")
    return folder


def clean_environment() -> dict[str, str]:
    """The environment with this repository's packages instead of this interpreter's, and without a network."""
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    return os.environ | offline | {"PYTHONPATH": PATHS}


def build_job(tiny: Path, command: list[str] | None, steps: int) -> str:
    """The sample with the tiny model and data, and with ``command`` instead of its own."""
    documents: list[Any] = list(yaml.safe_load_all(SAMPLE))
    (container,) = documents[-1]["spec"]["template"]["spec"]["containers"]
    container["command"] = command or container["command"]
    known = ("--model_name_or_path=", "--dataset_name=", "--max_steps=", "--save_steps=")
    kept = [argument for argument in container["args"] if not argument.startswith(known)]
    own = [f"--model_name_or_path={tiny / 'model'}", f"--dataset_name={tiny / 'texts'}", f"--max_steps={steps}"]
    container["args"] = [*kept, *own, "--save_steps=2", *SMALL]
    return yaml.safe_dump_all(documents)


def run_job(folder: Path, text: str) -> str:
    """Run the job to its end; return the log of pod 0. The claim remains in ``folder``."""
    folder.mkdir(exist_ok=True)
    with DdpRun(folder, text, ["--quiet", "--cpu"], clean_environment(), PYTHON) as run:
        assert run.wait() == 0, run.output
        log = (run.run_folder / "logs" / "attempt-1-pod-0.log").read_text()
        progress = run.read_status()["progress"]
        shutil.rmtree(run.run_folder)  # DdpRun expects one run in the folder
    assert progress["step"] == progress["totalSteps"]
    return log


def read_global_step(checkpoint: Path) -> int:
    return int(json.loads((checkpoint / "trainer_state.json").read_text())["global_step"])


def test_sample_fine_tunes_and_resumes_from_newest_checkpoint(tiny: Path, tmp_path: Path) -> None:
    claim = tmp_path / "run" / "ddp-runs" / "claims" / "sft-checkpoints"
    run_job(tmp_path / "run", build_job(tiny, None, steps=4))
    assert sorted(path.name for path in claim.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-4"]
    log = run_job(tmp_path / "run", build_job(tiny, None, steps=6))
    assert sorted(path.name for path in claim.glob("checkpoint-*")) == ["checkpoint-4", "checkpoint-6"]
    assert read_global_step(claim / "checkpoint-6") == 6
    assert log.count("'loss': ") == 2  # of the steps 5 and 6


def test_trl_module_runs_as_command(tiny: Path, tmp_path: Path) -> None:
    command = ["python", "-m", "trl.scripts.sft", "--output_dir", str(tmp_path / "out")]
    run_job(tmp_path / "run", build_job(tiny, command, steps=2))
    assert read_global_step(tmp_path / "out" / "checkpoint-2") == 2
