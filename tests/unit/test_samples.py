"""Every sample works unchanged, and does what its comment describes."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from ddp_cli.__main__ import main
from ddp_cli.client.validation import check_manifest
from ddp_operator import __version__
from ddp_operator.api.constants import API_VERSION, ENV_LAUNCHER_CONFIG, KIND
from ddp_pod.contract.plan import decode_plan
from ddp_trainer.config.presets import PRESETS
from tests.support.ddp_run import DdpRun

SAMPLES = Path(__file__).resolve().parents[2] / "deploy" / "samples"
SCHEMAS = SAMPLES.parent / "schemas"
RECIPES = sorted(path for path in SAMPLES.glob("recipes/*") if path.is_dir())
FILES = sorted([*SAMPLES.glob("*.yaml"), *(recipe / "job.yaml" for recipe in RECIPES)])
samples = pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SAMPLES)))


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


def job_of(path: Path) -> dict[str, Any]:
    (result,) = (document for document in documents(path) if document["kind"] == KIND)
    return result


def rendered_job(name: str) -> dict[str, Any]:
    """Return the Job of the first attempt."""
    children = check_manifest((SAMPLES / f"{name}.yaml").read_text()).children
    (result,) = (child for child in children if child["kind"] == "Job")
    return dict(result)


def test_every_use_has_sample() -> None:
    assert {path.stem for path in FILES} >= {
        "digits", "job", "voc", "kueue", "volcano", "own-script", "private-image", "checkpoint", "elastic"
    }  # fmt: skip
    names = [job_of(path)["metadata"]["name"] for path in FILES]
    assert len(set(names)) == len(names)


@samples
def test_sample_passes_ddp_render(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["render", "--check", str(path)]) == 0
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_page_of_recipes_states_the_versions(recipe: Path) -> None:
    page = (SAMPLES.parents[1] / "docs" / "recipes.md").read_text(encoding="utf-8")
    (row,) = re.findall(rf"^\| `{recipe.name}` \|.*$", page, flags=re.MULTILINE)
    requirements = recipe / "requirements.txt"
    for line in requirements.read_text().splitlines() if requirements.exists() else ():
        assert line.replace("==", " ") in row


@pytest.mark.parametrize(("has_checkpoint", "begin"), [(False, "scratch"), (True, "resume")])
def test_recipe_of_nanogpt_resumes_if_it_has_saved(has_checkpoint: bool, begin: str, tmp_path: Path) -> None:
    (container,) = job_of(SAMPLES / "recipes" / "nanogpt" / "job.yaml")["spec"]["template"]["spec"]["containers"]
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$@"\n')
    python.chmod(0o755)
    if has_checkpoint:
        (tmp_path / "ckpt.pt").touch()
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "DDP_CHECKPOINT_DIR": str(tmp_path)}

    command = [*container["command"], *container["args"], "--max_iters=5"]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)

    script = "train.py config/train_gpt2.py"
    assert ran.stdout == f"{script} --out_dir={tmp_path} --init_from={begin} --wandb_log=False --max_iters=5\n"


def editor_errors(document: dict[str, Any]) -> list[str]:
    """Return what an editor with the schema of deploy/schemas marks, as paths."""
    schema = json.loads((SCHEMAS / f"{document['kind'].lower()}.json").read_text(encoding="utf-8"))
    return [error.json_path for error in jsonschema.Draft7Validator(schema).iter_errors(document)]


@pytest.mark.parametrize("path", [*FILES, SAMPLES.parent / "profiles" / "h100.yaml"], ids=lambda path: path.stem)
def test_editor_schema_accepts_sample(path: Path) -> None:
    ours = [document for document in documents(path) if document["apiVersion"] == API_VERSION]
    assert ours
    assert [editor_errors(document) for document in ours] == [[] for _ in ours]


@pytest.mark.parametrize(
    ("name", "value", "place"),
    [("nodez", 2, "$.spec"), ("nodes", "two", "$.spec.nodes"), ("cleanPodPolicy", "Some", "$.spec.cleanPodPolicy"),
     ("scheduling", {"gang": "Native", "queu": "q"}, "$.spec.scheduling"), ("procPerNode", 1.5, "$.spec.procPerNode")],
)  # fmt: skip
def test_editor_schema_marks_mistake(name: str, value: Any, place: str) -> None:
    document = job_of(SAMPLES / "digits.yaml")
    document["spec"][name] = value
    assert editor_errors(document) == [place]
    assert editor_errors(document | {"apiVersion": "v1"}) == ["$.apiVersion", place]


@samples
def test_other_objects_in_sample_are_valid(path: Path) -> None:
    for document in documents(path):
        if document["kind"] != KIND:
            kubernetes_validate.validate(document, "1.31", strict=True)


@samples
def test_sample_starts_with_comment_on_use(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    comment = re.match(r"(# .*\n)+", text)
    assert comment is not None
    for command in re.findall(r"(?:ddp run|kubectl apply -f) (\S+)", comment[0]):
        assert command == f"deploy/samples/{path.name}"


@samples
def test_images_of_samples_have_tag_and_presets_exist(path: Path) -> None:
    for container in job_of(path)["spec"]["template"]["spec"]["containers"]:
        _, _, tag = container["image"].rpartition(":")
        assert tag
        assert tag != "latest"
        if "/ddp-operator/" in container["image"]:
            assert tag in {__version__, f"{__version__}-cuda"}
            arguments = container["args"]
            assert arguments[arguments.index("--preset") + 1] in PRESETS
            limits = container["resources"]["limits"]
            assert ("nvidia.com/gpu" in limits) == tag.endswith("-cuda")


@samples
def test_volumes_mounted_by_sample_are_declared(path: Path) -> None:
    pod = job_of(path)["spec"]["template"]["spec"]
    declared = {volume["name"] for volume in pod.get("volumes", [])}
    mounted = {mount["name"] for container in pod["containers"] for mount in container.get("volumeMounts", [])}
    assert mounted == declared
    maps = {volume["configMap"]["name"] for volume in pod.get("volumes", []) if "configMap" in volume}
    assert maps <= {document["metadata"]["name"] for document in documents(path) if document["kind"] == "ConfigMap"}


@pytest.mark.parametrize(
    ("name", "pods", "workers"), [("digits", 2, 1), ("job", 2, 4), ("voc", 4, 8), ("private-image", 2, 1)]
)
def test_sample_has_stated_number_of_pods_and_workers(name: str, pods: int, workers: int) -> None:
    job = rendered_job(name)
    assert (job["spec"]["completions"], job["spec"]["parallelism"]) == (pods, pods)
    container = job["spec"]["template"]["spec"]["containers"][0]
    (plan,) = (item["value"] for item in container["env"] if item["name"] == ENV_LAUNCHER_CONFIG)
    assert decode_plan(plan).nproc_per_node == workers


def test_queue_of_kueue_is_on_job() -> None:
    assert rendered_job("kueue")["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "training"


def test_registry_secret_is_in_pods() -> None:
    assert rendered_job("private-image")["spec"]["template"]["spec"]["imagePullSecrets"] == [{"name": "registry"}]


def test_claim_of_sample_is_included() -> None:
    path = SAMPLES / "checkpoint.yaml"
    (claim,) = (document for document in documents(path) if document["kind"] == "PersistentVolumeClaim")
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    volumes = rendered_job("checkpoint")["spec"]["template"]["spec"]["volumes"]
    assert {"claimName": claim["metadata"]["name"]} in [volume.get("persistentVolumeClaim") for volume in volumes]


@pytest.mark.process
@pytest.mark.nightly
def test_own_script_runs_on_this_machine(tmp_path: Path) -> None:
    text = (SAMPLES / "own-script.yaml").read_text()
    with DdpRun(tmp_path, text, ["--quiet", "--", "--steps", "60"]) as run:
        assert run.wait() == 0, run.output
        logs = "".join(path.read_text() for path in (run.run_folder / "logs").iterdir())
        progress = yaml.safe_load((run.run_folder / "status.yaml").read_text())["status"]["progress"]
    assert "step 50/60: loss" in logs
    # Read from the log by metrics.logPatterns; the script has no code for it.
    assert (progress["step"], progress["totalSteps"], progress["percent"]) == (50, 60, "83.3%")
    assert f"loss {float(progress['loss']):.3f}"[:8] in logs
    assert {rank for rank in (0, 1) if f"rank {rank}: y = " in logs} == {0, 1}
