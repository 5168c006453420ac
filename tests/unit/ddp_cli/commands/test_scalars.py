"""Texts that YAML's readers take for numbers, booleans or times pass through each command as texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ddp_cli.__main__ import main
from ddp_cli.client.client import Client
from ddp_cli.client.validation import check_manifest
from ddp_operator.api.documents import load_documents
from ddp_operator.api.yaml_writer import format_documents
from tests.support.builders import Json, resource, template, trainer
from tests.support.scalars import TEXTS, list_misread

ARGS = [text for text in TEXTS if "\x00" not in text]
VARIABLES = [{"name": "Y", "value": "0o17"}, {"name": "COMMIT", "value": "12e7"}, {"name": "DEBUG", "value": "n"}]
METADATA = {
    "labels": {"example.com/on": "on", "example.com/build": "0999"},
    "annotations": {"example.com/commit": "12e7"},
}


def build_job() -> Json:
    job = resource(template=template(trainer(args=ARGS, env=VARIABLES), metadata=METADATA))
    job["metadata"] |= METADATA
    return job


def find_container(document: Any) -> Any:
    return document["spec"]["template"]["spec"]["containers"][0]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(format_documents([build_job()]))
    return "job.yaml"


def test_render_prints_texts_as_written(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["render", file, "--whole"]) == 0
    whole = capsys.readouterr().out
    [job] = load_documents(whole)
    assert (find_container(job)["args"], find_container(job)["env"]) == (ARGS, VARIABLES)
    assert {name: job["metadata"][name] for name in METADATA} == METADATA
    assert main(["render", file]) == 0
    children = capsys.readouterr().out
    container = next(find_container(child) for child in load_documents(children) if child["kind"] == "Job")
    assert container["args"][-len(ARGS) :] == ARGS
    assert [variable for variable in container["env"] if variable in VARIABLES] == VARIABLES
    bare = list_misread(whole) + list_misread(children)
    assert [text for text in bare if not text.isdigit() and text not in ("true", "false")] == []


def test_init_writes_texts_as_given(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("on.py").write_text("")
    variables = [{"name": "Y", "value": "0o17"}, {"name": "A", "value": "😀"}, {"name": "B", "value": ""}]
    options = [f"--env={variable['name']}={variable['value']}" for variable in variables]
    assert main(["init", "on.py", "--image", "1e5", "--memory", "5e9", *options, "--", *ARGS]) == 0
    [job] = load_documents(capsys.readouterr().out)
    container = find_container(job)
    assert (job["metadata"]["name"], container["image"], container["args"]) == ("on", "1e5", ARGS)
    assert container["env"] == [
        {"name": "Y", "value": "0o17"},
        {"name": "A", "value": "😀"},
        {"name": "B", "value": ""},
    ]
    assert container["resources"]["requests"]["memory"] == "5e9"


class Recorder:
    """A backend that keeps the text of a job."""

    text = ""

    def create(self, text: str, *_: Any, **__: Any) -> tuple[Recorder, str, Json]:
        self.text = text
        return self, "train", build_job()


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Client:
    """Return a client that has written the job to its backend."""
    client = Client(backend="local")
    monkeypatch.setitem(vars(client), "backend", Recorder())
    client.submit(build_job())
    return client


def check_texts(text: str) -> None:
    assert find_container(check_manifest(text).resource)["args"] == ARGS


def test_client_writes_texts_as_given(client: Client) -> None:
    assert isinstance(client.backend, Recorder)
    check_texts(client.backend.text)
