"""`make images` without a builder or a cluster: the calls of images/build, and its final message."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ddp_operator import __version__
from tests.support.recording_tools import run_script

ROOT = Path(__file__).resolve().parents[2]
# Records its call; prints the current context on request, and fails if FAIL matches.
FAKE = """#!/bin/sh
echo "$(basename "$0") $*" >> "$CALLS"
case "$(basename "$0") $*" in
  "kubectl config current-context") echo "$CURRENT" ;;
  "minikube profile list -o json") echo '{"valid":[{"Name":"mini"}]}' ;;
esac
case "$(basename "$0") $*" in "${FAIL:-nothing}"*) exit 3 ;; esac
"""
BASICS = ("bash", "basename", "dirname", "git", "grep", "mkdir", "mktemp", "rm", "sed", "sh", "uname")


def run(
    folder: Path, *arguments: str, tools: tuple[str, ...], context: str = "", **env: str
) -> tuple[int, str, list[str]]:
    """Run the script with these tools, which only record their calls. Return code, output and calls."""
    script = ROOT / "images/build"
    env = {"CURRENT": context, **env}
    code, output, calls = run_script(script, *arguments, folder=folder, tool=FAKE, tools=tools, basics=BASICS, **env)
    asking = ("docker info", "kubectl config", "minikube profile")
    made = [call for call in calls if not call.startswith(asking)]
    assert not list(folder.glob("tmp.*")), "a temporary folder stayed"
    return code, output, made


@pytest.mark.parametrize(
    ("context", "tool", "load"),
    [
        ("kind-dev", "kind", "kind load image-archive --name dev "),
        ("k3d-dev", "k3d", "k3d image import --cluster dev "),
        ("mini", "minikube", "minikube --profile mini image load "),
    ],
)
def test_images_are_loaded_into_local_cluster_of_context(tmp_path: Path, context: str, tool: str, load: str) -> None:
    code, output, calls = run(tmp_path, tools=("docker", "kubectl", tool), context=context)
    assert code == 0, output
    names = [f"localhost/ddp-operator/{name}:{__version__}" for name in ("operator", "trainer")]
    assert [name in call for name, call in zip(names, calls[:2], strict=True)] == [True, True]
    assert [call.startswith(load) for call in calls] == [False, False, False, True, False, True]
    assert "helm install ddp-operator charts/ --namespace ddp-operator --create-namespace\n" in output
    assert f"image: {names[1]}" in output


@pytest.mark.parametrize("builder", ["docker", "podman", "buildah"])
def test_images_are_loaded_by_command_of_load(tmp_path: Path, builder: str) -> None:
    load = "ctr -n k8s.io image import"
    code, output, calls = run(tmp_path, tools=(builder, "ctr", "kubectl", "kind"), context="kind-dev", LOAD=load)
    assert code == 0, output
    loaded = [call for call in calls if call.startswith(load)]
    assert len(loaded) == 2
    assert all(call.endswith("/image.tar") for call in loaded)
    assert not [call for call in calls if call.startswith("kind ")]
    assert "helm install ddp-operator charts/ --namespace ddp-operator --create-namespace\n" in output


@pytest.mark.parametrize("builder", ["docker", "podman", "buildah"])
def test_every_builder_pushes_to_registry(tmp_path: Path, builder: str) -> None:
    code, output, calls = run(tmp_path, tools=(builder,), REGISTRY="registry.example/team/", TORCH="cu130")
    assert code == 0, output
    prefix = "registry.example/team/ddp-operator"
    assert calls[2:] == [
        f"{builder} push {prefix}/operator:{__version__}",
        f"{builder} push {prefix}/trainer:{__version__}-cuda",
    ]
    assert "--build-arg TORCH=cu130" in calls[1]
    assert "--set image.registry=registry.example/team\n" in output


@pytest.mark.parametrize("builder", ["podman", "buildah"])
def test_layouts_have_both_architectures_and_time_of_commit(tmp_path: Path, builder: str) -> None:
    code, output, calls = run(
        tmp_path, "operator", tools=("docker", builder, "kubectl", "kind"), context="kind-dev",
        OCI=str(tmp_path / "oci"), SOURCE_DATE_EPOCH="1700000000",
    )  # fmt: skip
    assert code == 0, output
    name = f"localhost/ddp-operator/operator:{__version__}"
    builds = [call for call in calls if call.startswith(f"{builder} build ")]
    assert [re.search(r"--platform (\S+)", call)[1] for call in builds] == ["linux/amd64", "linux/arm64"]  # type: ignore[index]
    for call in builds:
        assert f"--manifest {name} --timestamp 1700000000 " in call
        assert "--tag" not in call
    pushed = f"{builder} manifest push --quiet --all {name} oci:{tmp_path}/oci/operator-{__version__}:{__version__}"
    assert [call for call in calls if " push " in call] == [pushed]
    assert not [call for call in calls if call.startswith("kind ")]


def test_without_cluster_or_registry_next_step_is_named(tmp_path: Path) -> None:
    code, output, calls = run(tmp_path, "operator", tools=("podman", "kubectl"), context="gke_prod")
    assert (code, len(calls)) == (0, 1)
    assert "make images REGISTRY=" in output


@pytest.mark.parametrize("step", ["docker build", "docker save", "kind load"])
def test_failing_step_ends_script(tmp_path: Path, step: str) -> None:
    code, output, calls = run(tmp_path, tools=("docker", "kubectl", "kind"), context="kind-dev", FAIL=step)
    assert code == 3
    assert calls[-1].startswith(step)
    assert "helm install" not in output


@pytest.mark.parametrize(
    ("tools", "env", "arguments", "message"),
    [
        ((), {}, (), "install docker, podman or buildah"),
        (("docker",), {"FAIL": "docker info"}, (), "or start the docker daemon"),
        (("docker", "kubectl"), {"CURRENT": "kind-dev"}, (), "kind is not installed; context kind-dev needs it"),
        (("docker",), {}, ("launcher",), "unknown image launcher; known: operator, trainer"),
        (("docker",), {"OCI": "x"}, (), "install podman or buildah"),
        (("docker",), {"LOAD": "x", "REGISTRY": "y"}, (), "cannot be combined with REGISTRY"),
        (("docker",), {"OCI": "x", "BUILDER": "docker"}, (), "docker cannot write OCI layouts"),
    ],
)
def test_missing_tool_is_reported_before_build(
    tmp_path: Path, tools: tuple[str, ...], env: dict[str, str], arguments: tuple[str, ...], message: str
) -> None:
    context = env.pop("CURRENT", "")
    code, output, calls = run(tmp_path, *arguments, tools=tools, context=context, **env)
    assert (code, calls) == (2, [])
    assert message in output
