"""A container of a rendered pod, run by the kernel's namespaces instead of a kubelet.

It has only the parts that the pod requests: command, environment, user, file system, volumes. The image is one of this
machine's own Python with the environment of the tests. It supports the pod fields that our manifests use, and refuses
all others. The network is this machine's.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.error import URLError
from urllib.request import urlopen

from tests.support import PATIENCE, ROOT, container_main
from tests.support.stoppable import Stoppable

BASE_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
ACCOUNT: Final = "/var/run/secrets/kubernetes.io/serviceaccount"
UNITS: Final = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30}

Object = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Volume:
    """A mounted volume: an empty folder where ``files`` is None."""

    path: str
    size: int | None = None
    files: Mapping[str, str] | None = None
    read_only: bool = False


@dataclass(frozen=True, kw_only=True)
class Container:
    """The result of a kubelet and an image for a container. ``shared`` maps paths inside it to paths outside."""

    root: str
    command: Sequence[str]
    env: Mapping[str, str]
    folder: str
    user: int
    group: int
    groups: Sequence[int]
    read_only: bool
    volumes: Sequence[Volume]
    shared: Mapping[str, str]
    links: Mapping[str, str]
    files: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class PodContext:
    """The values that a cluster adds to a pod. ``fields``: the downward API; ``objects``: ConfigMaps and Secrets."""

    env: Mapping[str, str]
    account: Mapping[str, str]
    fields: Mapping[str, str]
    objects: Sequence[Object] = ()
    image_env: Mapping[str, str] = field(default_factory=dict)
    image_folder: str = "/"


def read_container(pod: Object, around: PodContext, root: Path) -> Container:
    """Translate the only container of a pod's spec."""
    (container,) = pod["containers"]
    identity = pod["securityContext"]
    limits = container["securityContext"]
    _only(identity, "runAsNonRoot", "runAsUser", "runAsGroup", "fsGroup", "seccompProfile")
    _only(limits, "allowPrivilegeEscalation", "capabilities", "readOnlyRootFilesystem")
    assert identity["runAsNonRoot"]
    assert limits["allowPrivilegeEscalation"] is False
    assert limits["capabilities"] == {"drop": ["ALL"]}

    own = {entry["name"]: resolve_env(entry, around) for entry in container.get("env", ())}
    links, shared = _find_programs()
    return Container(
        root=str(root),
        command=[*container["command"], *container.get("args", ())],
        env={**around.image_env, **around.env, **own},
        folder=container.get("workingDir", around.image_folder),
        user=identity["runAsUser"],
        group=identity["runAsGroup"],
        groups=[identity["runAsGroup"], identity["fsGroup"]],
        read_only=limits["readOnlyRootFilesystem"],
        volumes=_read_volumes(pod, container, around),
        shared=shared,
        links=links,
        files={"/etc/passwd": "root:x:0:0:root:/root:/bin/sh\n", "/etc/group": "root:x:0:\n"},
    )


def resolve_env(entry: Object, around: PodContext) -> str:
    """Return the value of a container's variable."""
    if "value" in entry:
        return str(entry["value"])
    ((kind, source),) = entry["valueFrom"].items()
    if kind == "fieldRef":
        return around.fields[source["fieldPath"]]
    kinds = {"configMapKeyRef": "ConfigMap", "secretKeyRef": "Secret"}
    data = _find_data(around.objects, kinds[kind], source["name"])
    return data[source["key"]]


def _find_data(objects: Iterable[Object], kind: str, name: str) -> Mapping[str, str]:
    (result,) = (obj for obj in objects if (obj["kind"], obj["metadata"]["name"]) == (kind, name))
    return {**result.get("data", {}), **result.get("stringData", {})}


def _read_volumes(pod: Object, container: Object, around: PodContext) -> list[Volume]:
    sources = {volume["name"]: volume for volume in pod.get("volumes", ())}
    results = []
    for mount in container.get("volumeMounts", ()):
        _only(mount, "name", "mountPath", "readOnly")
        source = sources[mount["name"]]
        _only(source, "name", "emptyDir", "configMap")
        if "configMap" in source:
            files = _find_data(around.objects, "ConfigMap", source["configMap"]["name"])
            results.append(Volume(path=mount["mountPath"], files=files, read_only=True))
        else:
            size = _parse_size(source["emptyDir"].get("sizeLimit"))
            results.append(Volume(path=mount["mountPath"], size=size, read_only=mount.get("readOnly", False)))
    if pod.get("automountServiceAccountToken", True):
        results.append(Volume(path=ACCOUNT, files=around.account, read_only=True))
    return results


def _parse_size(text: str | None) -> int | None:
    if text is None:
        return None
    match = re.fullmatch(r"(\d+)(Ki|Mi|Gi)", text)
    assert match is not None, text
    return int(match[1]) * UNITS[match[2]]


def _find_programs() -> tuple[dict[str, str], dict[str, str]]:
    """Return links and shared folders that make an image of this Python, its packages and the system's libraries."""
    links = {}
    shared = {"/usr": "/usr"}
    for path in ("/bin", "/sbin", "/lib", "/lib64"):
        if os.path.islink(path):
            links[path] = os.readlink(path)
        elif os.path.isdir(path):
            shared[path] = path
    base = os.path.realpath(sys.base_prefix)
    if not Path(base).is_relative_to("/usr"):
        shared[base] = base
    for path in ("/etc/ld.so.cache", *(f"/dev/{name}" for name in ("null", "zero", "random", "urandom"))):
        if os.path.exists(path):
            shared[path] = path
    # An editable installation names the sources by their path.
    for folder in ("operator", "trainer/ddp_trainer/memory"):  # what the operator's image copies
        shared[str(ROOT / folder)] = str(ROOT / folder)
    shared["/opt/venv"] = sys.prefix
    return links, shared


def _only(fields: Object, *known: str) -> None:
    assert not fields.keys() - set(known), f"not translated: {sorted(fields.keys() - set(known))}"


class ContainerProcess(Stoppable):
    """Runs a container until the end of the block."""

    def __init__(self, container: Container, log: Path) -> None:
        Path(container.root).mkdir(exist_ok=True)
        self._log = log
        with log.open("ab") as stream:
            self._process = subprocess.Popen(
                [sys.executable, "-I", container_main.__file__],
                stdin=subprocess.PIPE,
                stdout=stream,
                stderr=stream,
                env={},
            )
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asdict(container)).encode())
        self._process.stdin.close()

    def __enter__(self) -> ContainerProcess:
        return self

    @property
    def log(self) -> str:
        """All output of the container."""
        return self._log.read_text(errors="replace")

    def wait(self) -> int:
        """Wait for the end of the command. Return its exit code."""
        try:
            return self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.stop()
            raise AssertionError(f"the container did not end:\n{self.log}") from None

    def wait_until_ok(self, url: str) -> None:
        """Wait until a page returns 200."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            code = self._process.poll()
            if code is not None:
                raise AssertionError(f"the container ended with exit code {code}:\n{self.log}")
            try:
                with urlopen(url, timeout=5):
                    return
            except (URLError, OSError):
                time.sleep(0.05)
        raise AssertionError(f"{url} did not answer 200:\n{self.log}")

    def terminate(self) -> int:
        """End the container as a kubelet does. Return the exit code of the command."""
        self._process.terminate()
        return self.wait()

    def stop(self) -> None:
        """Kill the container."""
        self._process.kill()
        self._process.wait()
