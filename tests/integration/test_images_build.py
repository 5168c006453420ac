"""The operator's image, built where buildah and a base image are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddp_operator import __version__
from tests.unit.test_dockerfiles import ROOT, requirements

BASE = "localhost/ddp-test-base"
BUILT = "localhost/ddp-test-operator"


def buildah(*arguments: str | Path, timeout: float = 300) -> str:
    """Call buildah; return what it printed."""
    ran = subprocess.run(["buildah", *map(str, arguments)], capture_output=True, text=True, timeout=timeout)
    assert ran.returncode == 0, f"buildah {' '.join(map(str, arguments))}:\n{ran.stdout[-4000:]}\n{ran.stderr[-4000:]}"
    return ran.stdout.strip()


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The operator's dependencies, taken by this Python's pip from wherever it takes packages."""
    folder = tmp_path_factory.mktemp("wheels")
    command = [
        sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--only-binary=:all:",
        "--dest", folder, "--constraint", ROOT / ".ci/constraints.txt", *requirements("operator"), "hatchling",
    ]  # fmt: skip
    ran = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300)
    if ran.returncode:
        pytest.skip(f"the wheels are not to be had here: {ran.stderr.strip().splitlines()[-1]}")
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The image of DDP_TEST_BASE_IMAGE with pip in it, whatever it had."""
    source = os.environ.get("DDP_TEST_BASE_IMAGE")
    if not source:
        pytest.skip("DDP_TEST_BASE_IMAGE is not set (an image with this Python's version: docker://… or oci-archive:…)")
    import pip

    container = buildah("from", source)
    try:
        version = "import sys, site; print(*sys.version_info[:2]); print(site.getsitepackages()[0])"
        said, folder = buildah("run", "--isolation=chroot", container, "--", "python3", "-c", version).splitlines()
        if said.split() != [str(number) for number in sys.version_info[:2]]:
            pytest.skip(f"DDP_TEST_BASE_IMAGE has Python {said}, the wheels are for that of the tests")
        buildah("copy", container, Path(pip.__file__).parent, f"{folder}/pip")
        buildah("commit", "--quiet", container, BASE)
    finally:
        buildah("rm", container)
    yield BASE
    buildah("rmi", "--force", BASE)


@pytest.mark.buildah
def test_operator_image_runs_without_torch_and_as_nobody(base: str, wheels: Path) -> None:
    buildah(
        "build", "--isolation=chroot", "--layers=false", "--pull-never", "--volume", f"{wheels}:/wheels:ro",
        "--build-arg", f"BASE={base}", "--build-arg", "PIP_NO_INDEX=1", "--build-arg", "PIP_FIND_LINKS=/wheels",
        "--build-arg", "REVISION=test", "--file", ROOT / "images/operator/Dockerfile", "--tag", BUILT, ROOT,
    )  # fmt: skip
    try:
        config = json.loads(buildah("inspect", "--type=image", BUILT))["OCIv1"]["config"]
        assert config["User"] == "65532:65532"
        assert config["Entrypoint"] == ["python", "-m", "ddp_operator"]
        assert config["Labels"]["org.opencontainers.image.version"] == __version__
        assert config["Labels"]["org.opencontainers.image.revision"] == "test"
        container = buildah("from", "--pull-never", BUILT)
        try:
            inside = ("run", "--isolation=chroot", container, "--")
            assert buildah(*inside, "python", "-m", "ddp_operator", "--version") == f"ddp-operator {__version__}"
            code = (
                "import importlib.util, os; import ddp_operator.handlers; "
                "names = ('torch', 'ddp_trainer', 'kubernetes', 'pip'); "
                "print(os.getuid(), [name for name in names if importlib.util.find_spec(name)])"
            )
            assert buildah(*inside, "/opt/venv/bin/python", "-I", "-c", code) == "65532 []"
            assert int(buildah(*inside, "du", "-sm", "/opt/venv").split()[0]) < 75, "with slim Python: below 200 MB"
        finally:
            buildah("rm", container)
    finally:
        buildah("rmi", "--force", BUILT)
