"""The images, built where buildah exists.

The base is the image of DDP_TEST_BASE_IMAGE (docker://… or oci-archive:…), otherwise one of this machine's own Python,
shell and libraries: nothing is pulled. The Dockerfile is the same.
"""

from __future__ import annotations

import importlib.util
import json
import marshal
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import pytest

from ddp_operator import __version__
from tests.repository.test_dockerfiles import requirements
from tests.support import ROOT


def load(path: str) -> ModuleType:
    """Import a script of the repository."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


install = load("images/install.py")
release = load(".ci/release.py")
PROGRAMS = ("sh", "rm", "ls", "du", "cat", "grep")
BASE = "localhost/ddp-test-base"


def buildah(*arguments: str | Path, timeout: float = 900) -> str:
    """Call buildah and return its output."""
    ran = subprocess.run(["buildah", *map(str, arguments)], capture_output=True, text=True, timeout=timeout)
    assert ran.returncode == 0, f"buildah {' '.join(map(str, arguments))}:\n{ran.stdout[-4000:]}\n{ran.stderr[-4000:]}"
    return ran.stdout.strip()


def download(folder: Path, *packages: str, architecture: str = "amd64") -> Path:
    """Download wheels of the pinned versions with this Python's pip; skip if it cannot."""
    chosen = [word for name in install.platforms(architecture) for word in ("--platform", name)]
    built_with = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    pip = [
        sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--only-binary=:all:",
        "--dest", folder,
    ]  # fmt: skip
    # PyTorch has no hash, and pip requires hashes for all packages or none.
    pytorch = [name for name in packages if name.startswith("torch")]
    peers = [name for name in packages if name not in pytorch]
    commands = [[*pip, "--constraint", ROOT / ".ci/constraints.txt", *chosen, *peers, *built_with]]
    if pytorch:
        commands.append([*pip, *chosen, *pytorch])
    for command in commands:
        ran = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=600)
        if ran.returncode:
            pytest.skip(f"pip cannot download the wheels here: {ran.stderr.strip().splitlines()[-1]}")
    return folder


def make_root(folder: Path) -> None:
    """Create the files of a small system: this Python, below /usr/local, and the few programs that a build calls."""
    home = folder / "usr/local"
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    for path in ("usr/local/bin", "usr/local/lib", "bin", "etc", "tmp", "proc", "dev", "sys"):
        (folder / path).mkdir(parents=True)
    (folder / "tmp").chmod(0o1777)
    (folder / "etc/passwd").write_text("root:x:0:0::/:/bin/sh\n")
    python = Path(sys.executable).resolve()
    shutil.copy2(python, home / "bin" / version)
    for name in ("python", "python3"):
        (home / "bin" / name).symlink_to(version)
    # Two thirds of the files, which no build needs.
    left_out = shutil.ignore_patterns(
        "site-packages", "dist-packages", "test", "tests", "idlelib", "tkinter", "ensurepip", "pydoc_data",
        "turtledemo", "_tkinter*", "lib2to3", "config-*",
    )  # fmt: skip
    library = home / "lib" / version
    shutil.copytree(sysconfig.get_path("stdlib"), library, ignore=left_out)
    (library / "site-packages").mkdir()
    programs = [Path(results).resolve() for name in PROGRAMS if (results := shutil.which(name))]
    for program, name in zip(programs, PROGRAMS, strict=True):
        shutil.copy2(program, folder / "bin" / name)
    asked = subprocess.run(
        ["ldd", python, *programs, *library.glob("lib-dynload/*.so")], capture_output=True, text=True, check=False
    )
    results = {Path(name) for name in re.findall(r"(/\S+\.so\S*) \(0x", asked.stdout)}
    # Wheels are linked to the older parts of the C library, too.
    parts = ("libpthread.so.0", "libdl.so.2", "librt.so.1", "libutil.so.1", "libm.so.6", "libgcc_s.so.1",
             "libstdc++.so.6")  # fmt: skip
    results |= {path.with_name(part) for path in results if path.name == "libc.so.6" for part in parts}
    for shared in sorted(path for path in results if path.exists()):
        target = folder / str(shared).lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(shared.resolve(), target)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The tag of an image with Python and pip in it."""
    import pip

    source = os.environ.get("DDP_TEST_BASE_IMAGE")
    tried = subprocess.run(["buildah", "unshare", "true"] if os.getuid() else ["true"], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"buildah may make no containers here: {tried.stderr.strip().splitlines()[-1]}")
    container = buildah("from", source or "scratch")
    try:
        if not source:
            root = tmp_path_factory.mktemp("root")
            make_root(root)
            buildah("copy", "--quiet", container, root, "/")
            buildah("config", "--env", "PATH=/usr/local/bin:/bin", container)
        version = "import sys, site; print(*sys.version_info[:2]); print(site.getsitepackages()[0])"
        message, folder = buildah("run", "--isolation=chroot", container, "--", "python3", "-c", version).splitlines()
        if message.split() != [str(number) for number in sys.version_info[:2]]:
            pytest.skip(f"DDP_TEST_BASE_IMAGE has Python {message}, the wheels are for that of the tests")
        buildah("copy", container, Path(pip.__file__).parent, f"{folder}/pip")
        buildah("commit", "--quiet", container, BASE)
    finally:
        buildah("rm", container)
    yield BASE
    buildah("rmi", "--force", BASE)


@contextmanager
def built(name: str, base: str, wheels: Path) -> Iterator[tuple[dict[str, Any], Callable[..., str]]]:
    """Build an image from its Dockerfile. Return its configuration, and a function that runs a program in it."""
    tag = f"localhost/ddp-test-{name}"
    buildah(
        "build", "--isolation=chroot", "--layers=false", "--pull-never", "--volume", f"{wheels}:/wheels:ro",
        "--build-arg", f"BASE={base}", "--build-arg", "PIP_NO_INDEX=1", "--build-arg", "PIP_FIND_LINKS=/wheels",
        "--build-arg", "REVISION=test", "--timestamp", "1700000000",
        "--file", ROOT / f"images/{name}/Dockerfile", "--tag", tag, ROOT,
    )  # fmt: skip
    try:
        config = json.loads(buildah("inspect", "--type=image", tag))["OCIv1"]["config"]
        container = buildah("from", "--pull-never", tag)
        try:
            yield config, lambda *words: buildah("run", "--isolation=chroot", container, "--", *words)
        finally:
            buildah("rm", container)
    finally:
        buildah("rmi", "--force", tag)


@pytest.mark.parametrize("held", [[], None])
def test_packages_are_compiled_reproducibly_and_once(
    held: list[CodeType] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file must contain no trace of the other objects in the process that refer to a function's code."""

    def compile_and_hold(*arguments: Any, **options: Any) -> CodeType:
        code: CodeType = compile(*arguments, **options)
        if held is not None:
            held.extend(co_const for co_const in code.co_consts if isinstance(co_const, CodeType))
        return code

    monkeypatch.setattr(install, "compile", compile_and_hold, raising=False)
    source = "def found():\n    return 'found'\nprint(found())\n"
    module = tmp_path / "module.py"
    module.write_text(source)
    (tmp_path / "template.py").write_text("{{ this }} is no Python")
    install.compile_all(tmp_path)
    (compiled,) = (tmp_path / "__pycache__").iterdir()
    assert compiled.read_bytes()[16:] == marshal.dumps(compile(source, module, "exec", dont_inherit=True), 2)
    module.write_text("print('compiled anew')")
    assert subprocess.check_output([sys.executable, "-c", "import module"], cwd=tmp_path, text=True) == "found\n"


@pytest.mark.nightly
@pytest.mark.buildah
def test_operator_image_runs_without_torch_and_root(base: str, tmp_path: Path) -> None:
    with built("operator", base, download(tmp_path, *requirements("operator"))) as (config, run):
        assert config["User"] == "65532:65532"
        assert config["Entrypoint"] == ["python", "-m", "ddp_operator"]
        assert config["Labels"]["org.opencontainers.image.version"] == __version__
        assert config["Labels"]["org.opencontainers.image.revision"] == "test"
        assert run("python", "-m", "ddp_operator", "--version") == f"ddp-operator {__version__}"
        # A scanner's bill of materials lists the name and pinned version of every package.
        code = (
            "import importlib.metadata, importlib.util, os; import ddp_operator.manager.handlers; "
            "names = ('torch', 'ddp_trainer', 'kubernetes', 'pip'); "
            "print(os.getuid(), [name for name in names if importlib.util.find_spec(name)]); "
            "[print(d.name.lower() + '==' + d.version) for d in importlib.metadata.distributions()]"
        )
        message, *packages = run("/opt/venv/bin/python", "-I", "-c", code).replace("_", "-").splitlines()
        assert message == "65532 []"
        constraints = (ROOT / ".ci/constraints.txt").read_text().splitlines()
        pinned = {line.split()[0].lower().replace("_", "-") for line in constraints if "==" in line}
        assert set(packages) - pinned == {f"ddp-operator=={__version__}"}
        assert len(packages) > 10
        assert int(run("du", "-sm", "/opt/venv").split()[0]) < 75, "with slim Python: below 200 MB"


@pytest.mark.nightly
@pytest.mark.buildah
@pytest.mark.timeout(1200)
def test_images_of_both_architectures_share_digest_without_emulation(
    base: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The base for the other architecture has no programs: any program that the build ran would fail."""
    if platform.machine() != "x86_64":
        pytest.skip("the base image of this machine's own Python is for the other architecture here")
    wheels = tmp_path / "wheels"
    for architecture in install.MACHINES:
        download(wheels, *requirements("operator"), architecture=architecture)
    both = "localhost/ddp-test-both"
    empty = "localhost/ddp-test-empty"
    container = buildah("from", "--arch", "arm64", "scratch")
    buildah("copy", "--quiet", container, wheels.parent / "wheels" / next(wheels.iterdir()).name, "/some-file")
    buildah("commit", "--quiet", "--rm", container, empty)
    buildah("manifest", "create", both)
    try:
        for name, architecture in ((base, "amd64"), (empty, "arm64")):
            buildah("manifest", "add", "--arch", architecture, "--os", "linux", both, name)
        arguments = (
            f"--isolation=chroot --pull-never --volume {wheels}:/wheels:ro --build-arg BASE={both} "
            "--build-arg PIP_NO_INDEX=1 --build-arg PIP_FIND_LINKS=/wheels"
        )
        indexes = []
        for folder in (tmp_path / "once", tmp_path / "twice"):
            env = os.environ | {
                "OCI": str(folder), "BUILDER": "buildah", "BUILD_ARGS": arguments, "REVISION": "test",
                "SOURCE_DATE_EPOCH": "1700000000",
            }  # fmt: skip
            subprocess.run([ROOT / "images/build", "operator"], env=env, check=True, timeout=900)
            indexes.append((folder / f"operator-{__version__}/index.json").read_text())
        assert indexes[0] == indexes[1]
        images = dict(release.read_layout(tmp_path / f"once/operator-{__version__}"))
        assert set(images) == {"amd64", "arm64"}
        for architecture, layers in images.items():
            release.check_machine("operator", architecture, layers)
        assert "all for its architecture" in capfd.readouterr().out
    finally:
        buildah("manifest", "rm", both)
        buildah("rmi", "--force", empty)


@pytest.mark.nightly
@pytest.mark.buildah
@pytest.mark.timeout(1200)
def test_trainer_image_is_reproducible_and_trains_without_root(base: str, tmp_path: Path) -> None:
    if not os.environ.get("DDP_TEST_TRAINER_IMAGE"):
        pytest.skip("DDP_TEST_TRAINER_IMAGE is not set (builds the trainer's image: minutes, and gigabytes of disk)")
    torch = [line for line in (ROOT / ".ci/pytorch.txt").read_text().splitlines() if line.startswith("torch")]
    wheels = download(tmp_path, *torch, *requirements("trainer"))
    images = []
    with built("trainer", base, wheels):
        images.append(buildah("images", "--no-trunc", "--quiet", "localhost/ddp-test-trainer"))
    with built("trainer", base, wheels) as (config, run):
        images.append(buildah("images", "--no-trunc", "--quiet", "localhost/ddp-test-trainer"))
        assert images[0] == images[1], "the same bits"
        assert config["User"] == "65532:65532"
        assert config["Labels"]["org.opencontainers.image.version"] == __version__
        message = run("python", "-m", "ddp_trainer", "--preset", "digits-resnet", "--max-steps", "4")
        assert "loss" in message
        code = "import importlib.util, os; print(os.getuid(), importlib.util.find_spec('ddp_operator'))"
        assert run("/opt/venv/bin/python", "-I", "-c", code) == "65532 None"
