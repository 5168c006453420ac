"""A container's environment, command and volumes as the kubelet makes them, with folders of this machine for volumes.

Kubernetes expands ``$(NAME)`` itself, without a shell: in a variable's value from the variables before it, in command
and args from all of them. A name that is not set stays as it is written, and ``$$(NAME)`` is a literal ``$(NAME)``.

Without privileges nothing can be mounted, so ``/ckpt/last.pt`` in an argument becomes the path of the same file in the
volume's folder. A path that is only written inside the training script is out of reach; docs/local.md says so.
"""

import base64
import binascii
import fcntl
import os
import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from ddp_operator.cluster import Object

Lookup = Callable[[str, str], Object | None]
"""Find a ConfigMap or Secret of the pod's namespace by kind and name."""

_REFERENCE = re.compile(r"\$(?:\$|\(([^)]*)\))")
_VALID_NAME = re.compile(r"[-._a-zA-Z][-._a-zA-Z0-9]*")


class MissingReference(Exception):
    """The container refers to something that is not there; the message is for the user."""


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Expand ``$(NAME)`` and ``$$`` in ``text``."""
    return _REFERENCE.sub(lambda match: "$" if match[1] is None else variables.get(match[1], match[0]), text)


def build_environment(pod: Object, container: Object, lookup: Lookup) -> dict[str, str]:
    """Return the variables that the pod gives to this container.

    Raises: MissingReference.
    """
    found: dict[str, str] = {}
    for source in container.get("envFrom") or ():
        prefix = source.get("prefix", "")
        for kind, member in (("ConfigMap", "configMapRef"), ("Secret", "secretRef")):
            if reference := source.get(member):
                data = read_reference(kind, reference, lookup) or {}
                found |= {prefix + key: _text(value) for key, value in data.items() if _VALID_NAME.fullmatch(key)}
    for variable in container.get("env") or ():
        name = variable["name"]
        origin = variable.get("valueFrom")
        if not origin:
            found[name] = expand(str(variable.get("value") or ""), found)
            continue
        value = _value_from(pod, name, origin, lookup)
        if value is not None:
            found[name] = value
    return found


def read_data(item: Object) -> dict[str, bytes]:
    """Return the files that a ConfigMap or Secret holds."""
    data: dict[str, bytes] = {}
    secret = item.get("kind") == "Secret"
    for member in ("data", "binaryData"):
        encoded = secret if member == "data" else True
        for key, value in (item.get(member) or {}).items():
            try:
                data[key] = base64.b64decode(value, validate=False) if encoded else str(value).encode()
            except (binascii.Error, ValueError, TypeError):
                where = f"{item['kind']} {item['metadata']['name']}: {member}.{key}"
                raise MissingReference(f"{where} is not valid base64; encode it or use stringData") from None
    data |= {key: str(value).encode() for key, value in (item.get("stringData") or {}).items()}
    return data


def read_reference(kind: str, reference: Object, lookup: Lookup, *, name: str = "name") -> dict[str, bytes] | None:
    """Return the files of the ConfigMap or Secret that a reference names, or None where it is optional and not there.

    Raises: MissingReference.
    """
    item = lookup(kind, reference[name])
    if item is not None:
        return read_data(item)
    if reference.get("optional"):
        return None
    raise MissingReference(
        f'{kind} "{reference[name]}" is not in the file; add it as another document, or make the reference optional'
    )


def _value_from(pod: Object, name: str, origin: Object, lookup: Lookup) -> str | None:
    if field := origin.get("fieldRef"):
        return _field(pod, name, field["fieldPath"])
    for kind, member in (("ConfigMap", "configMapKeyRef"), ("Secret", "secretKeyRef")):
        if reference := origin.get(member):
            data = read_reference(kind, reference, lookup) or {}
            if reference["key"] in data:
                return _text(data[reference["key"]])
            if reference.get("optional"):
                return None
            raise MissingReference(f'{kind} "{reference["name"]}" has no key "{reference["key"]}" (variable {name})')
    raise MissingReference(f"variable {name}: valueFrom.{next(iter(origin), '')} is not supported on this machine")


def _field(pod: Object, name: str, path: str) -> str:
    metadata = pod["metadata"]
    if match := re.fullmatch(r"metadata\.(labels|annotations)\['(.*)'\]", path):
        return str((metadata.get(match[1]) or {}).get(match[2], ""))
    values = {
        "metadata.name": metadata["name"],
        "metadata.namespace": metadata["namespace"],
        "metadata.uid": metadata["uid"],
        "spec.nodeName": "local",
        "spec.serviceAccountName": pod["spec"].get("serviceAccountName", "default"),
        **dict.fromkeys(("status.hostIP", "status.hostIPs", "status.podIP", "status.podIPs"), "127.0.0.1"),
    }
    if path not in values:
        raise MissingReference(f"variable {name}: unknown field {path}; use one of {', '.join(values)}")
    return str(values[path])


def _text(value: bytes) -> str:
    return value.decode("utf-8", "surrogateescape")


SHARED_MEMORY = "/dev/shm"
# What may stand before and after a path in a longer word: `--dir=/ckpt/x`, `a:/ckpt`, but not `/ckpt2` or `my/ckpt`.
_BEFORE, _AFTER = r"(?<![\w./~-])", r"(?![\w.~-])"


def rewrite_paths(text: str, places: Mapping[str, Path]) -> str:
    """Replace every path of a container by its place on this machine; the longest mount path wins."""
    if not places or "/" not in text:
        return text
    longest_first = sorted(places, key=len, reverse=True)
    pattern = _BEFORE + "(" + "|".join(map(re.escape, longest_first)) + ")" + _AFTER
    return re.sub(pattern, lambda match: str(places[match[1]]), text)


def prepare_volumes(pod: Object, container: Object, folder: Path, claims: Path, lookup: Lookup) -> dict[str, Path]:
    """Make the folders of all volumes that the container mounts and return what its paths become.

    ``folder`` holds those of the pod, ``claims`` claims, which outlive the run. Raises: MissingReference, OSError.
    """
    volumes = {volume["name"]: volume for volume in pod["spec"].get("volumes") or ()}
    made: dict[str, Path | None] = {}
    places: dict[str, Path] = {}
    for mount in container.get("volumeMounts") or ():
        name, inside = mount["name"], mount["mountPath"].rstrip("/") or "/"
        if inside == SHARED_MEMORY:
            continue
        if name not in volumes:
            raise MissingReference(f'volumeMounts: there is no volume "{name}"; add it to volumes')
        if inside == "/":
            raise MissingReference("volumeMounts: a volume at / is not supported on this machine; mount it below /")
        if name not in made:
            made[name] = _prepare(volumes[name], folder, claims, lookup)
        source = made[name]
        if source is None:
            continue
        if sub_path := mount.get("subPath"):
            source = _below(source, sub_path)
            if not source.exists() and "configMap" not in volumes[name]:
                source.mkdir(parents=True)
        places[inside] = source
    return places


def _prepare(volume: Object, pod: Path, claims: Path, lookup: Lookup) -> Path | None:
    """Make one volume's folder; None where it is optional and not there."""
    if host := volume.get("hostPath"):
        return _host_path(host)
    if claim := volume.get("persistentVolumeClaim"):
        folder = _below(claims, claim["claimName"])
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    folder = _below(pod, volume["name"])
    for kind, member, name in (("ConfigMap", "configMap", "name"), ("Secret", "secret", "secretName")):
        if reference := volume.get(member):
            data = read_reference(kind, reference, lookup, name=name)
            if data is not None:
                _write_files(folder, data, reference.get("items"), 0o600 if kind == "Secret" else 0o644)
            return None if data is None else folder
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _write_files(folder: Path, data: Mapping[str, bytes], items: Sequence[Object] | None, mode: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for key, path in [(i["key"], i["path"]) for i in items] if items is not None else [(k, k) for k in data]:
        if key not in data:
            raise MissingReference(f'volume {folder.name}: no key "{key}" to project')
        target = _below(folder, path)
        target.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data[key])


def _host_path(host: Object) -> Path:
    path, kind = Path(host["path"]), host.get("type") or ""
    if kind == "DirectoryOrCreate":
        path.mkdir(parents=True, exist_ok=True)
    elif kind == "FileOrCreate":
        path.touch()
    elif not path.exists():
        raise MissingReference(f"hostPath {path}: no such file or folder on this machine; create it")
    return path


def _below(folder: Path, part: str) -> Path:
    """Join, and refuse what would leave the folder."""
    joined = Path(os.path.normpath(folder / part))
    if os.path.isabs(part) or folder not in joined.parents:
        raise MissingReference(f'the path "{part}" leaves its volume; remove the ".." or the leading "/"')
    return joined


class ClaimInUse(Exception):
    """Another `ddp run` writes to the claim. The text names it, if known."""


class ClaimLock:
    """The exclusive use of a claim until the process ends, however it ends: two runs would overwrite each other's
    checkpoints."""

    def __init__(self, claims: Path, claim: str) -> None:
        """Take the lock. Raises: ClaimInUse, OSError."""
        claims.mkdir(parents=True, exist_ok=True)
        self._folder = claims / claim
        # Beside the claim's folder, which belongs to the training script. No claim's name begins with a dot.
        self._descriptor = os.open(claims / f".{claim}.lock", os.O_RDWR | os.O_CREAT, 0o666)
        self.release = weakref.finalize(self, os.close, self._descriptor)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(self._descriptor, 4096).decode("utf-8", "replace").strip()
            self.release()
            raise ClaimInUse(holder or "another `ddp run`") from None
        except OSError:
            pass  # a file system without locks

    def tracking_run(self, job: str) -> str:
        """Return the identity under which trackers know what a job has saved here, a new one where it has nothing.

        Raises: OSError.
        """
        note = self._folder.with_name(f".{self._folder.name}.{job}.run")
        if not note.exists() or not self._folder.is_dir() or not any(self._folder.iterdir()):
            note.write_text(f"{job}-{os.urandom(4).hex()}", encoding="utf-8")
        return note.read_text(encoding="utf-8")

    def sign(self, holder: str) -> None:
        """Write who holds it, for the message to others."""
        with suppress(OSError):  # a full disk
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, holder.encode(), 0)
