"""How a `Client` builds jobs from functions, scripts and YAML, with the packed folder."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ddp_cli import Client, ClientError
from ddp_cli.client import local
from ddp_cli.client.functions import ENTRY
from ddp_cli.client.local import LocalBackend
from ddp_cli.client.program import IMAGE
from ddp_cli.client.validation import check_manifest
from ddp_cli.client.workdir import Workdir
from ddp_cli.local.folder import ENV_RUN_FOLDER
from tests.support import ROOT
from tests.support.fake_backend import FakeBackend


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeBackend]:
    """A client's cluster, and a folder with a script that is also a module."""
    backend = FakeBackend({})
    monkeypatch.setattr(Client, "backend", backend)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_training.py").write_text("def fit(lr, epochs=1): ...\n")
    yield backend
    sys.modules.pop("my_training", None)


def container(backend: FakeBackend) -> dict[str, Any]:
    assert backend.resource is not None
    result: dict[str, Any] = backend.resource["spec"]["template"]["spec"]["containers"][0]
    return result


def test_function_travels_with_its_modules_folder(backend: FakeBackend, tmp_path: Path) -> None:
    from my_training import fit  # type: ignore[import-not-found]

    job = Client().train(
        fit,
        nodes=4,
        args={"lr": 0.1},
        env={"A": "b"},
        checkpoint_claim="weights",
        pip=True,
        spec={"recovery": {"maxRestarts": 5}},
    )
    assert (job.name, backend.workdir) == ("fit", Workdir(tmp_path, pip=True))
    *command, call = container(backend)["command"]
    assert command == ["python3", "-c", ENTRY]
    assert json.loads(call) == {"module": "my_training", "function": "fit", "path": ".", "args": {"lr": 0.1}}
    made = check_manifest(json.dumps(job.resource)).job.spec
    assert (made.nodes, made.proc_per_node, made.recovery.max_restarts) == (4, "auto", 5)
    assert made.checkpoint is not None
    assert made.checkpoint.claim_name == "weights"
    assert (container(backend)["image"], container(backend)["env"]) == (IMAGE, [{"name": "A", "value": "b"}])


@pytest.mark.parametrize(
    ("visible", "procs", "gpus"),
    [(None, "auto", 1), (None, 4, 1), (8, "gpu", 4), (8, 3, 3), (1, "auto", 1), (8, "cpu", 0)],
)
def test_gpus_are_shared_among_pods(backend: FakeBackend, visible: int | None, procs: Any, gpus: int) -> None:
    backend.gpus = visible
    Client().train("my_training.py", nodes=2, procs=procs, cpus=2 if procs == "cpu" else None)
    limits = container(backend).get("resources", {"limits": {}})["limits"]
    assert limits == ({"nvidia.com/gpu": str(gpus)} if gpus else {"cpu": "2"} if procs == "cpu" else {})
    Client().train("my_training.py", nodes=2, procs="auto", gpus=0)
    assert "resources" not in container(backend)


def test_invalid_programs_are_refused_before_anything_is_created(
    backend: FakeBackend, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from my_training import fit

    with pytest.raises(TypeError, match="arguments by name, in a dict"):
        Client().train(fit, args=[0.1])
    with pytest.raises(TypeError, match="missing a required argument: 'lr'"):
        Client().train(fit)
    with pytest.raises(TypeError, match="as a list"):
        Client().train("my_training.py", args={"lr": 1})
    with pytest.raises(ClientError, match="the script does not exist"):
        Client().train("none.py")
    with pytest.raises(ClientError, match="is outside of --workdir"):
        Client().train("my_training.py", workdir=tmp_path / "other")
    monkeypatch.setenv("HOME", str(tmp_path))
    for program in (fit, "my_training.py"):
        with pytest.raises(ClientError, match="is not chosen by default"):
            Client().train(program, args={"lr": 1} if program is fit else [])
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    with pytest.raises(ClientError, match="__main__"):
        Client().train("my_training.py", workdir=".")
    assert backend.resource == {}


def test_manifest_is_path_text_or_dict(backend: FakeBackend, tmp_path: Path) -> None:
    source = {"metadata": {"name": "x"}, "spec": {}}
    (tmp_path / "job.yaml").write_text(json.dumps(source))
    for manifest in ("job.yaml", tmp_path / "job.yaml", json.dumps(source, indent=1), source):
        assert Client().submit(manifest).resource == source
        assert backend.workdir is None
    Client().submit(source, workdir=".", include=["a"], code_claim="shared")
    assert backend.workdir == Workdir(Path("."), ["a"], claim="shared")
    with pytest.raises(ClientError, match=r"none\.yaml"):
        Client().submit("none.yaml")


FAKE_DDP = """#!{python}
import json, os, sys
if "--pip" in sys.argv:
    sys.exit("ddp run: refused\\nspec.nodes: must be at least 1")
with open("asked.json", "w") as file:
    json.dump([sys.argv[1:], sys.stdin.read()], file)
with open(int(os.environ["{variable}"]), "w") as answer:
    answer.write(os.path.abspath("ddp-runs/x-1"))
"""


def test_run_on_this_machine_is_ddp_run_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ddp = tmp_path / "ddp"
    ddp.write_text(FAKE_DDP.format(python=sys.executable, variable=ENV_RUN_FOLDER))
    ddp.chmod(0o755)
    monkeypatch.setattr(local.sys, "executable", str(ddp))
    folder = tmp_path / "ddp-runs" / "x-1"
    folder.mkdir(parents=True)
    (folder / "status.yaml").write_text("metadata: {name: x}\nspec: {}\n")
    backend = LocalBackend(Path("ddp-runs"))
    _, name, made = backend.create("kind: x", Workdir(Path("src"), ["a.env"]))
    assert (name, made["metadata"]) == ("x-1", {"name": "x"})
    words, text = json.loads(Path("asked.json").read_text())
    assert words[3:] == ["run", "-", "--quiet", "--runs-dir", "ddp-runs", "--workdir", "src", "--include=a.env"]
    assert text == "kind: x"
    with pytest.raises(ClientError, match=r"^refused\nspec\.nodes: must be at least 1$"):
        backend.create("", Workdir(Path("src"), pip=True))
    with pytest.raises(ClientError, match="dry_run needs a cluster"):
        backend.create("", None, dry_run=True)


def test_examples_of_page_run_unchanged(
    backend: FakeBackend, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text("")
    (tmp_path / "training.py").write_text("def train(learning_rate): ...\n")
    backend.statuses = ({"phase": "Succeeded", "progress": {"step": 7, "loss": "0.5"}},)
    names: dict[str, Any] = {}
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/python.md").read_text(), re.DOTALL)
    for block in blocks:
        exec(block, names)
    assert capsys.readouterr().out == "7 0.5\n"
    assert (len(blocks), names["job"].name) == (2, "train")
    sys.modules.pop("training")
