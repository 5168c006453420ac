"""Texts that YAML's readers take for other values pass through `ddp convert` as texts."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_cli.__main__ import main
from ddp_operator.api.documents import load_documents
from ddp_operator.api.yaml_writer import format_documents
from tests.support.builders import template, trainer
from tests.support.scalars import WORDS
from tests.unit.ddp_cli.commands.test_scalars import METADATA, VARIABLES, find_container


def test_convert_prints_texts_as_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pod = template(
        trainer(name="pytorch", args=WORDS, env=VARIABLES, command=["python", "train.py"]), metadata=METADATA
    )
    old = {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": "scalars", **METADATA},
        "spec": {"pytorchReplicaSpecs": {"Master": {"replicas": 1, "template": pod}}},
    }
    other = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}, "data": dict.fromkeys(WORDS, "y")}
    (tmp_path / "old.yaml").write_text(format_documents([old, other]))
    assert main(["convert", str(tmp_path / "old.yaml")]) == 0
    job, config = load_documents(capsys.readouterr().out)
    assert (find_container(job)["args"], find_container(job)["env"]) == (WORDS, VARIABLES)
    assert job["metadata"]["annotations"] == METADATA["annotations"]
    assert config == other
