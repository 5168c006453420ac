"""Build a release from the last commit into ``dist/``, twice, and compare both builds bit by bit.

A release contains the wheel and the sdist, the images for amd64 and arm64 as OCI layouts, the chart as an archive and
as an OCI artifact with the images' digests and the annotations of Artifact Hub, plain manifests, the kubectl plugin for
krew, bills of materials (CycloneDX) and checksums. This program uploads nothing: ``.ci/publish`` does, and the release
workflow signs the published artifacts.
"""

import argparse
import gzip
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import helm_python
import yaml

ROOT = Path(__file__).resolve().parent.parent
TOOLS_LOCK = ROOT / ".ci/release-tools.txt"
MACHINES = {"amd64": 62, "arm64": 183}
"""Architecture in the header of an ELF file."""
CHART_CONFIG = "application/vnd.cncf.helm.config.v1+json"
CHART_CONTENT = "application/vnd.cncf.helm.chart.content.v1.tar+gzip"
HUB_CONFIG = "application/vnd.cncf.artifacthub.config.v1+yaml"
HUB_METADATA = "application/vnd.cncf.artifacthub.repository-metadata.layer.v1.yaml"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"


class Blob(NamedTuple):
    """A part of an OCI artifact."""

    media_type: str
    data: bytes


class ArchiveMember(NamedTuple):
    """A file of an archive."""

    name: str
    content: bytes
    mode: int


def run(*words: str | Path, **options: Any) -> None:
    """Run a command with its output shown. Raises: SystemExit."""
    if subprocess.run(list(map(str, words)), check=False, **options).returncode:
        raise SystemExit(f"release: failed: {' '.join(map(str, words))}")


def output(*words: str) -> str:
    """Return the output of a command."""
    return subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def tools() -> Path:
    """Return the ``bin`` of a separate environment with the tools; the first call creates it."""
    home = ROOT / "build/release"
    stamp = home / "tools"
    lock = TOOLS_LOCK.read_text()
    if not stamp.exists() or stamp.read_text() != lock:
        if subprocess.run([sys.executable, "-m", "venv", "--clear", home], check=False, capture_output=True).returncode:
            run(sys.executable, "-m", "venv", "--clear", "--without-pip", home)  # a Python without ensurepip
        install = [sys.executable, "-m", "pip", "--python", home / "bin/python", "install", "--quiet"]
        run(*install, "--require-hashes", "-r", TOOLS_LOCK)
        stamp.write_text(lock)
    return home / "bin"


class Build:
    """One build of a version from a folder of sources into another folder."""

    def __init__(self, source: Path, out: Path, registry: str, epoch: int, revision: str, repository: str = "") -> None:
        self.source = source
        self.out = out
        self.registry = registry
        self.epoch = epoch
        self.repository = repository.rstrip("/")
        self.env = os.environ | {"SOURCE_DATE_EPOCH": str(epoch), "REVISION": revision}
        self.version = yaml.safe_load((source / "charts/Chart.yaml").read_text())["appVersion"]

    def packages(self) -> None:
        """Build the wheel and the sdist."""
        run(tools() / "python", "-m", "build", "--outdir", self.out, ".", cwd=self.source, env=self.env,
            stdout=subprocess.DEVNULL)  # fmt: skip

    def images(self, names: list[str]) -> None:
        """Build the images, check the architecture of their programs, and write their bills of materials."""
        run(self.source / "images/build", *names, env=self.env | {"OCI": str(self.out / "images")})
        for name in names:
            for architecture, layers in read_layout(self.out / f"images/{name}-{self.version}"):
                check_machine(f"{name} for {architecture}", architecture, layers)
                self.bill(f"{name}-{architecture}", layers)

    def bill(self, name: str, layers: list[Path]) -> None:
        """Write the bill of materials of an image's Python packages, from their metadata."""
        with tempfile.TemporaryDirectory() as folder:
            run(tools() / "python", "-m", "venv", "--without-pip", folder)
            (site,) = Path(folder).glob("lib/python3*/site-packages")
            for member, read in members(layers):
                found = re.search(r"^opt/venv/lib/python3[^/]*/site-packages/([^/]+\.dist-info)/([^/]+)$", member.name)
                if found:
                    (site / found[1]).mkdir(exist_ok=True)
                    (site / found[1] / found[2]).write_bytes(read())
            run(tools() / "cyclonedx-py", "environment", "--output-reproducible", "--of", "JSON", "-o",
                self.out / f"{name}-{self.version}.cdx.json", folder, env=self.env)  # fmt: skip

    def digest(self, image: str) -> str:
        """Return the digest of an image in a registry; empty if it was not built."""
        index = self.out / f"images/{image}-{self.version}/index.json"
        return str(json.loads(index.read_text())["manifests"][0]["digest"]) if index.exists() else ""

    def chart(self) -> None:
        """Package the chart with the registry and the digests as its defaults, and as an OCI artifact."""
        with tempfile.TemporaryDirectory() as folder:
            chart = Path(shutil.copytree(self.source / "charts", Path(folder) / "ddp-operator"))
            values = (chart / "values.yaml").read_text()
            values = replace(values, "image.registry", self.registry)
            values = replace(values, "image.digest", self.digest("operator"))
            values = replace(values, "tests.digest", self.digest("trainer"))
            (chart / "values.yaml").write_text(values)
            (chart / "Chart.yaml").write_text(self.chart_metadata())
            packed = helm_python.package(chart, destination=folder)
            metadata = yaml.safe_load((chart / "Chart.yaml").read_text())
            archive = self.out / Path(packed).name
            archive.write_bytes(repack(Path(packed), self.epoch))
        config = Blob(CHART_CONFIG, json.dumps(metadata, sort_keys=True).encode())
        content = Blob(CHART_CONTENT, archive.read_bytes())
        write_layout(self.out / f"chart-{self.version}", self.version, config, content)
        self.artifact_hub()

    def chart_metadata(self) -> str:
        """Return the chart's Chart.yaml with the annotations of Artifact Hub."""
        images = [f"--image={name}={self.digest(name)}" for name in ("operator", "trainer")]
        command = [sys.executable, "-m", "charts.tooling.artifacthub", f"--registry={self.registry}", *images]
        command.append(f"--repository={self.repository}")
        return subprocess.run(command, cwd=self.source, check=True, capture_output=True, text=True).stdout

    def artifact_hub(self) -> None:
        """Write Artifact Hub's metadata of the charts' repository as an OCI layout."""
        metadata = (self.source / "charts/artifacthub-repo.yml").read_bytes()
        write_layout(self.out / "artifacthub", "artifacthub.io", Blob(HUB_CONFIG, b"{}"), Blob(HUB_METADATA, metadata))

    def krew(self) -> None:
        """Write the archive of the kubectl plugin, and its manifest if the address of the source code is known."""
        folder = self.source / "deploy/krew"
        members = [ArchiveMember("LICENSE", (self.source / "LICENSE").read_bytes(), 0o644)]
        members.append(ArchiveMember("kubectl-ddp", (folder / "kubectl-ddp").read_bytes(), 0o755))
        archive = pack(members, self.epoch)
        (self.out / f"kubectl-ddp-{self.version}.tar.gz").write_bytes(archive)
        if not self.repository:
            print("release: without --repository, the manifest for krew is not written")
            return

        text = (folder / "ddp.yaml").read_text().partition("apiVersion:")
        manifest = text[1] + text[2]
        values = {"VERSION": self.version, "REPOSITORY": self.repository, "SHA256": hashlib.sha256(archive).hexdigest()}
        for name, value in values.items():
            manifest = manifest.replace(f"@{name}@", value)
        (self.out / "ddp.yaml").write_text(manifest)

    def manifests(self) -> None:
        """Write the manifests for ``kubectl apply``: only the CRDs, and everything with the image's digest."""
        folder = self.source / "deploy/manifests"
        names = yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"]
        text = "---\n".join((folder / name).read_text() for name in names)
        definitions = "---\n".join((folder / name).read_text() for name in names if name.endswith("crd.yaml"))
        name = f"ddp-operator/operator:{self.version}"
        digest = self.digest("operator")
        pinned = f"{self.registry}/{name}" + (f"@{digest}" if digest else "")
        (self.out / f"ddp-operator-{self.version}.yaml").write_text(text.replace(f"localhost/{name}", pinned))
        (self.out / f"ddptrainingjobs-{self.version}.crd.yaml").write_text(definitions)

    def checksums(self) -> dict[str, str]:
        """Write ``SHA256SUMS`` and return it, without the blobs of layouts, whose names are their digests."""
        files = sorted(
            path
            for path in self.out.rglob("*")
            if path.is_file() and path.name != ".gitignore" and "blobs" not in path.parts
        )
        sums = {str(path.relative_to(self.out)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
        (self.out / "SHA256SUMS").write_text("".join(f"{digest}  {name}\n" for name, digest in sums.items()))
        return sums


def replace(values: str, path: str, value: str) -> str:
    """Return values.yaml with the empty or local default at ``group.key`` replaced. Raises: SystemExit."""
    group, key = path.split(".")
    text, count = re.subn(rf'(?m)^({group}:\n(?:  .*\n|\n)*?  {key}: )(""|localhost)$', rf'\g<1>"{value}"', values)
    if count != 1:
        raise SystemExit(f"release: charts/values.yaml has no empty default of {path} to replace")
    return text


def read_layout(layout: Path) -> Iterator[tuple[str, list[Path]]]:
    """Yield each architecture of an image with the files of its layers."""

    def blob(described: dict[str, Any]) -> Path:
        return layout / "blobs" / described["digest"].replace(":", "/")

    (index,) = json.loads((layout / "index.json").read_text())["manifests"]
    for described in json.loads(blob(index).read_text())["manifests"]:
        manifest = json.loads(blob(described).read_text())
        yield described["platform"]["architecture"], [blob(layer) for layer in manifest["layers"]]


def members(layers: list[Path]) -> Iterator[tuple[tarfile.TarInfo, Any]]:
    """Yield the files of all layers, each with its reader."""
    for layer in layers:
        with tarfile.open(layer, "r:*") as archive:
            for member in archive:
                if member.isfile() and (file := archive.extractfile(member)):
                    yield member, file.read


def check_machine(image: str, architecture: str, layers: list[Path]) -> None:
    """Check the architecture of the programs and libraries of an image. Raises: SystemExit."""
    heads = [(member.name, read(20)) for member, read in members(layers)]
    machines = {name: int.from_bytes(head[18:20], "little") for name, head in heads if head[:4] == b"\x7fELF"}
    wrong = [name for name, machine in machines.items() if machine != MACHINES[architecture]]
    if wrong or not machines:
        raise SystemExit(f"release: the image {image} has files for another architecture, such as {wrong[:3]}")
    print(f"{image}: {len(machines)} programs and libraries, all for its architecture")


def repack(archive: Path, epoch: int) -> bytes:
    """Return a reproducible archive of the files of another one."""
    with tarfile.open(archive) as old:
        files = ((member.name, old.extractfile(member)) for member in old.getmembers())
        return pack([ArchiveMember(name, file.read(), 0o644) for name, file in files if file], epoch)


def pack(members: list[ArchiveMember], epoch: int) -> bytes:
    """Return a reproducible archive: files sorted, with one time and without owners."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for member in sorted(members):
            info = tarfile.TarInfo(member.name)
            info.size = len(member.content)
            info.mode = member.mode
            info.mtime = epoch
            archive.addfile(info, io.BytesIO(member.content))
    return gzip.compress(packed.getvalue(), mtime=0)


def write_layout(layout: Path, tag: str, config: Blob, content: Blob) -> None:
    """Write an artifact as an OCI layout, as ``helm push`` or ``oras push`` stores it in a registry."""

    def store(blob: Blob) -> dict[str, Any]:
        digest = hashlib.sha256(blob.data).hexdigest()
        (layout / "blobs/sha256").mkdir(parents=True, exist_ok=True)
        (layout / "blobs/sha256" / digest).write_bytes(blob.data)
        return {"mediaType": blob.media_type, "digest": f"sha256:{digest}", "size": len(blob.data)}

    layers = {"config": store(config), "layers": [store(content)]}
    manifest = json.dumps({"schemaVersion": 2, "mediaType": MANIFEST, **layers}).encode()
    named = store(Blob(MANIFEST, manifest)) | {"annotations": {"org.opencontainers.image.ref.name": tag}}
    (layout / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [named]}))
    (layout / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')


def build(out: Path, folder: Path, revision: str, arguments: argparse.Namespace) -> dict[str, str]:
    """Build a commit once, from sources in a separate folder; return the checksums."""
    folder.mkdir()
    out.mkdir()
    archive = subprocess.run(["git", "archive", revision], cwd=ROOT, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as sources:
        sources.extractall(folder, filter="data")
    committed = int(output("git", "log", "-1", "--format=%ct", revision))
    made = Build(folder, out, arguments.registry, committed, revision, arguments.repository)
    made.packages()
    if not arguments.packages:
        if arguments.images:
            made.images(arguments.images)
        made.chart()
        made.manifests()
        made.krew()
    return made.checksums()


def main() -> None:
    """Build, compare, and keep the first build in ``dist``."""
    parser = argparse.ArgumentParser(prog="release", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--registry", default="localhost", help="where the images will be, such as ghcr.io/team")
    parser.add_argument(
        "--repository",
        default="",
        metavar="URL",
        help="address of the source code, such as https://github.com/team/repo",
    )
    parser.add_argument("--images", nargs="*", default=["operator", "trainer"], help="which to build (default: both)")
    parser.add_argument("--packages", action="store_true", help="the wheel and the sdist alone")
    parser.add_argument("--once", action="store_true", help="do not build a second time to compare")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    arguments = parser.parse_args()
    if output("git", "status", "--porcelain"):
        print("release: uncommitted changes are not included", file=sys.stderr)
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        revision = output("git", "rev-parse", "HEAD")
        first = build(work / "first", work / "a", revision, arguments)
        if not arguments.once:
            second = build(work / "second", work / "another-folder", revision, arguments)
            differ = sorted(name for name in first if first[name] != second.get(name))
            if differ or len(first) != len(second):
                raise SystemExit(f"release: the two builds differ: {', '.join(differ) or 'other files'}")
        shutil.rmtree(arguments.out, ignore_errors=True)
        shutil.copytree(work / "first", arguments.out)
    print((arguments.out / "SHA256SUMS").read_text(), end="")
    print("release: built once" if arguments.once else "release: built twice, the builds are identical")
    if not arguments.packages and not arguments.images:
        print("release: INCOMPLETE: no image was built, so chart and manifests have no digests")


if __name__ == "__main__":
    main()
