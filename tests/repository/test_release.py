"""The results of ``make release``: the chart, the manifests, layouts and checks; and its workflow."""

from __future__ import annotations

import importlib.util
import io
import json
import tarfile
from pathlib import Path
from types import ModuleType
from typing import Any

import helm_python
import pytest
import yaml

from ddp_operator import __version__
from tests.support import ROOT

DIGEST = f"sha256:{'a' * 64}"
OTHER = f"sha256:{'b' * 64}"


def load_release() -> ModuleType:
    """Return ``.ci/release.py`` as a module."""
    spec = importlib.util.spec_from_file_location("release", ROOT / ".ci/release.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def release() -> ModuleType:
    return load_release()


@pytest.fixture
def built(release: ModuleType, tmp_path: Path) -> Any:
    """A build of this checkout whose images exist already."""
    for name, digest in (("operator", DIGEST), ("trainer", OTHER)):
        layout = tmp_path / f"images/{name}-{__version__}"
        layout.mkdir(parents=True)
        (layout / "index.json").write_text(json.dumps({"manifests": [{"digest": digest}]}))
    return release.Build(
        ROOT, tmp_path, "registry.example/team", 1_700_000_000, "0" * 40, "https://github.com/team/ddp-operator/"
    )


def pack(path: Path, files: dict[str, bytes], mtime: int = 0) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            member.mtime = mtime
            member.uid = mtime
            archive.addfile(member, io.BytesIO(data))
    return path


def test_chart_names_images_by_their_digests(built: Any, tmp_path: Path) -> None:
    built.chart()
    with helm_python.Chart.load(tmp_path / f"ddp-operator-{__version__}.tgz") as chart:
        texts = "\n".join(chart.render({}, name="r", namespace="n").values())
    assert f"image: registry.example/team/ddp-operator/operator@{DIGEST}" in texts
    assert f"registry.example/team/ddp-operator/trainer@{OTHER}" in texts


def test_chart_takes_images_from_mirror_by_same_digests(built: Any, tmp_path: Path) -> None:
    built.chart()
    with helm_python.Chart.load(tmp_path / f"ddp-operator-{__version__}.tgz") as chart:
        values = {"global": {"imageRegistry": "mirror.example"}}
        texts = "\n".join(chart.render(values, name="r", namespace="n").values())
    assert f"image: mirror.example/ddp-operator/operator@{DIGEST}" in texts
    assert f"mirror.example/ddp-operator/trainer@{OTHER}" in texts
    assert "registry.example/team/ddp-operator" not in texts


def test_chart_equals_registry_content_and_is_reproducible(built: Any, tmp_path: Path) -> None:
    layout = tmp_path / f"chart-{__version__}"
    indexes = []
    for _ in range(2):
        built.chart()
        indexes.append((layout / "index.json").read_text())
    assert indexes[0] == indexes[1]
    (named,) = json.loads(indexes[0])["manifests"]
    manifest = json.loads((layout / "blobs" / named["digest"].replace(":", "/")).read_text())
    assert manifest["config"]["mediaType"] == "application/vnd.cncf.helm.config.v1+json"
    (layer,) = manifest["layers"]
    content = (layout / "blobs" / layer["digest"].replace(":", "/")).read_bytes()
    assert content == (tmp_path / f"ddp-operator-{__version__}.tgz").read_bytes()


def test_packaged_chart_has_the_annotations_of_artifact_hub(built: Any, tmp_path: Path) -> None:
    built.chart()
    with tarfile.open(tmp_path / f"ddp-operator-{__version__}.tgz") as archive:
        file = archive.extractfile("ddp-operator/Chart.yaml")
        assert file is not None
        chart = yaml.safe_load(file.read())
        assert "ddp-operator/artifacthub-repo.yml" not in archive.getnames()
    (operator, trainer) = yaml.safe_load(chart["annotations"]["artifacthub.io/images"])
    assert operator["image"] == f"registry.example/team/ddp-operator/operator:{__version__}@{DIGEST}"
    assert trainer["image"] == f"registry.example/team/ddp-operator/trainer:{__version__}@{OTHER}"
    assert chart["home"] == "https://github.com/team/ddp-operator"
    assert yaml.safe_load(chart["annotations"]["artifacthub.io/changes"])
    (named,) = json.loads((tmp_path / f"chart-{__version__}/index.json").read_text())["manifests"]
    manifest = json.loads((tmp_path / f"chart-{__version__}/blobs" / named["digest"].replace(":", "/")).read_text())
    config = tmp_path / f"chart-{__version__}/blobs" / manifest["config"]["digest"].replace(":", "/")
    assert json.loads(config.read_text())["annotations"] == chart["annotations"]


def test_metadata_of_artifact_hub_is_an_artifact_with_its_tag(built: Any, tmp_path: Path) -> None:
    built.artifact_hub()
    layout = tmp_path / "artifacthub"
    (named,) = json.loads((layout / "index.json").read_text())["manifests"]
    assert named["annotations"] == {"org.opencontainers.image.ref.name": "artifacthub.io"}
    (layer,) = json.loads((layout / "blobs" / named["digest"].replace(":", "/")).read_text())["layers"]
    assert layer["mediaType"] == "application/vnd.cncf.artifacthub.repository-metadata.layer.v1.yaml"
    content = (layout / "blobs" / layer["digest"].replace(":", "/")).read_bytes()
    assert content == (ROOT / "charts/artifacthub-repo.yml").read_bytes()


def test_manifests_are_complete_with_digest(built: Any, tmp_path: Path) -> None:
    built.manifests()
    results = list(yaml.safe_load_all((tmp_path / f"ddp-operator-{__version__}.yaml").read_text()))
    (operator,) = (item for item in results if item["kind"] == "Deployment")
    (container,) = operator["spec"]["template"]["spec"]["containers"]
    assert container["image"] == f"registry.example/team/ddp-operator/operator:{__version__}@{DIGEST}"
    assert {"CustomResourceDefinition", "Namespace", "ClusterRole", "ServiceAccount"} <= {
        item["kind"] for item in results
    }


def test_archive_depends_on_its_files_alone(release: ModuleType, tmp_path: Path) -> None:
    first = pack(tmp_path / "one.tgz", {"a": b"1", "b": b"2"}, mtime=5)
    two = pack(tmp_path / "two.tgz", {"b": b"2", "a": b"1"}, mtime=6)
    assert release.repack(first, 7) == release.repack(two, 7)
    assert release.repack(first, 7) != release.repack(pack(tmp_path / "three.tgz", {"a": b"1", "b": b"3"}), 7)


@pytest.mark.parametrize(
    ("machine", "refused"), [(183, False), (62, True), (None, True)], ids=["its own", "another", "no program at all"]
)
def test_image_with_programs_of_another_machine_is_refused(
    release: ModuleType, tmp_path: Path, machine: int | None, refused: bool
) -> None:
    program = b"\x7fELF".ljust(18, b"\0") + (machine or 0).to_bytes(2, "little")
    layer = pack(tmp_path / "layer", {"bin/sh": program} if machine else {"etc/passwd": b"root"})
    if not refused:
        release.check_machine("operator", "arm64", [layer])
        return
    with pytest.raises(SystemExit, match="files for another architecture"):
        release.check_machine("operator", "arm64", [layer])


def test_value_that_is_no_default_any_more_is_noticed(release: ModuleType) -> None:
    with pytest.raises(SystemExit, match=r"no empty default of image\.digest"):
        release.replace('image:\n  digest: "sha256:1"\ntests:\n  digest: ""\n', "image.digest", DIGEST)


class TestWorkflow:
    TEXT = (ROOT / ".github/workflows/release.yml").read_text(encoding="utf-8")

    def test_build_jobs_cannot_write_and_signing_jobs_do_not_build(self) -> None:
        workflow = yaml.safe_load(self.TEXT)
        assert workflow["permissions"] == {}
        jobs = workflow["jobs"]
        assert jobs["build"]["permissions"] == {"contents": "read"}
        for name, job in jobs.items():
            steps = " ".join(step.get("run", "") for step in job["steps"])
            assert ("make " in steps) == (name == "build")
            assert ("id-token" in job["permissions"]) == (name != "build")
