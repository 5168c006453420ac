"""A job's YAML for a script: what `ddp init` writes and `ddp run train.py` runs."""

from __future__ import annotations

from pathlib import Path, PurePath
from typing import Any

import pytest

from ddp_cli.__main__ import main
from ddp_cli.client.program import job_name
from ddp_cli.client.validation import check_manifest
from ddp_cli.commands import run as cli_run
from ddp_cli.commands.init import Script, write_manifest
from ddp_operator.api.parse import parse_resource
from ddp_operator.features import SCHEMA

SCRIPT = "import argparse\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "train").write_text(SCRIPT)
    return tmp_path


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("train.py", "train"), ("src/Train_GPT2.py", "train-gpt2"), ("01-mnist.py", "job-01-mnist"), ("Ü.py", "job"),
        ("a" * 80 + ".py", "a" * 40), ("my train (2).py", "my-train-2"), ("123.py", "job-123"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("gpus", [0, 8])
def test_generated_job_is_valid_for_any_script(path: str, name: str, gpus: int) -> None:
    script = Script(("python3", path), job_name(PurePath(path).stem))
    text = write_manifest(script, ["--epochs", "5", 'say "x"'], nodes=2, gpus=gpus)
    resource = check_manifest(text).resource
    job = parse_resource(resource, SCHEMA)
    assert (job.name, job.spec.nodes) == (name, 2)
    (container,) = resource["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["python3", path]
    assert container["args"] == ["--epochs", "5", 'say "x"']
    requests = {"cpu": "16", "memory": "64Gi"} if gpus else {"cpu": "1", "memory": "2Gi"}
    assert container["resources"] == {"requests": requests, **({"limits": {"nvidia.com/gpu": "8"}} if gpus else {})}
    assert max(map(len, text.splitlines())) <= 120 + len(path)


def test_init_prints_yaml_or_writes_new_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "train.py", "--nodes", "4", "--", "--epochs", "9"]) == 0
    printed = capsys.readouterr().out
    assert check_manifest(printed).resource["spec"]["nodes"] == 4
    assert main(["init", "train.py", "--nodes", "4", "-o", "job.yaml", "--", "--epochs", "9"]) == 0
    assert (folder / "job.yaml").read_text() == printed
    assert "ddp run job.yaml" in capsys.readouterr().out
    assert main(["init", "train.py", "-o", "job.yaml"]) == 2
    assert "job.yaml: the file exists" in capsys.readouterr().err
    assert (folder / "job.yaml").read_text() == printed, "nothing is lost"


def test_options_become_fields_of_the_job(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "run.sh").write_text("python train.py")
    options = "--nodes 2 --procs 3 --gpus 0 --cpus 0.5 --memory 2Gi --image a/b:1 --env A=1=2 --env B= run.sh"
    assert main(["init", *options.split()]) == 0
    spec = check_manifest(capsys.readouterr().out).resource["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    assert (spec["nodes"], spec["procPerNode"]) == (2, 3)
    assert container["command"] == ["bash", "run.sh"]
    assert container["image"] == "a/b:1"
    assert container["env"] == [{"name": "A", "value": "1=2"}, {"name": "B", "value": ""}]
    assert container["resources"] == {"requests": {"cpu": "0.5", "memory": "2Gi"}}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("runn train.py", "did you mean `ddp run`?"),
        ("run train.py --noeds 2", "did you mean --nodes?"),
        ("submit train.py --img x", "did you mean --image?"),
        ("run bash run.sh", "name only the script (ddp run run.sh)"),
        ("run train", "train: a script, not a job's YAML"),
        ("run train.py --nodes two", "'two': must be a whole number of at least 1"),
        ("init train.py --env A", "'A': must be NAME=VALUE"),
        ("init train.py --memory 1Gib", "'1Gib': must be a quantity"),
        ("run job.yaml --image x", "--image: only for a script; set the field in job.yaml"),
        ("run", "name a job's YAML or a script (train.py), or a module with -m MODULE"),
        ("init job.yaml", "not a script (.py, .sh)"),
        ("run gone.py", "gone.py: No such file or directory"),
        ("run train.py -m pkg", "both a file (train.py) and -m pkg"),
    ],
)
def test_mistyped_command_line_gets_its_remedy(
    words: str, message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(words.split())
    except SystemExit as ended:
        code = int(str(ended.code))
    assert code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "gpus", "nodes", "procs"),
    [
        ("train.py", "", 1, 1), ("train.py --nodes 2 --procs 3", "", 2, 3), ("train.py", "0,1", 1, 2),
        ("train.py --nodes 2", "0,1", 2, 1), ("train.py --procs 1", "0,1", 1, 1), ("train.py --cpu", "0,1", 1, 1),
        ("-m train", "", 1, 1),
    ],
)  # fmt: skip
def test_run_uses_script_and_this_machine(
    words: str, gpus: str, nodes: int, procs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    import argparse

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    parser = argparse.ArgumentParser()
    cli_run.add_arguments(parser)
    arguments = parser.parse_args(words.split())
    arguments.extra = ["--epochs", "2"]
    arguments.command_line = f"ddp run {words}"
    plan: Any = cli_run._prepare(cli_run.read_manifest(arguments), arguments)
    assert (plan.resource["spec"]["nodes"], plan.nproc) == (nodes, procs)
    (container,) = plan.resource["spec"]["template"]["spec"]["containers"]
    assert container["args"] == ["--epochs", "2"]
