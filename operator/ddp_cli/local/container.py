"""Build a container's environment, command and volumes as a kubelet does, with folders of this machine as volumes.

Kubernetes expands ``$(NAME)`` without a shell: in a variable's value from the variables before it, in command and args
from all variables. An unset name stays unchanged, and ``$$(NAME)`` is a literal ``$(NAME)``.

Mounts need privileges. Instead, ``/ckpt/last.pt`` in an argument is replaced by the path of that file in the volume's
folder. A path inside the training script cannot be replaced (docs/local.md).
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
from typing import Final

from ddp_cli.local.folder import replace_file
from ddp_cli.local.own_files import make_own_folder
from ddp_operator.api.cluster import Object
from ddp_pod.contract.plain_files import open_plain

Lookup = Callable[[str, str], Object | None]
"""Find a ConfigMap or Secret of the pod's namespace by kind and name."""

NODE_NAME: Final = "this machine"
_REFERENCE = re.compile(r"\$(?:\$|\(([^)]*)\))")
_LONGEST_RUN_ID = 256
_VALID_NAME = re.compile(r"[-._a-zA-Z][-._a-zA-Z0-9]*")


class MissingReference(Exception):
    """The container refers to an object that does not exist; the message is for the user."""


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Expand ``$(NAME)`` and ``$$`` in ``text``."""
    return _REFERENCE.sub(lambda match: "$" if match[1] is None else variables.get(match[1], match[0]), text)


def build_environment(pod: Object, container: Object, lookup: Lookup) -> dict[str, str]:
    """Return the container's environment variables. Raises: MissingReference."""
    variables: dict[str, str] = {}
    for source in container.get("envFrom") or ():
        prefix = source.get("prefix", "")
        for kind, member in (("ConfigMap", "configMapRef"), ("Secret", "secretRef")):
            if reference := source.get(member):
                data = read_reference(kind, reference, lookup) or {}
                variables |= {prefix + key: _text(value) for key, value in data.items() if _VALID_NAME.fullmatch(key)}
    for variable in container.get("env") or ():
        name = variable["name"]
        origin = variable.get("valueFrom")
        if not origin:
            variables[name] = expand(str(variable.get("value") or ""), variables)
            continue
        value = _value_from(pod, name, origin, lookup)
        if value is not None:
            variables[name] = value
    return variables


def read_data(item: Object) -> dict[str, bytes]:
    """Return the files of a ConfigMap or Secret. Raises: MissingReference."""
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
    """Return the files of the ConfigMap or Secret of a reference; None: it is optional and does not exist.

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
            raise MissingReference(
                f'variable {name}: {kind} "{reference["name"]}" has no key "{reference["key"]}"; add it'
            )
    source = next(iter(origin), "")
    raise MissingReference(f"variable {name}: valueFrom.{source} is not supported on this machine; write the value")


def _field(pod: Object, name: str, path: str) -> str:
    metadata = pod["metadata"]
    if match := re.fullmatch(r"metadata\.(labels|annotations)\['(.*)'\]", path):
        return str((metadata.get(match[1]) or {}).get(match[2], ""))
    values = {
        "metadata.name": metadata["name"],
        "metadata.namespace": metadata["namespace"],
        "metadata.uid": metadata["uid"],
        "spec.nodeName": NODE_NAME,
        "spec.serviceAccountName": pod["spec"].get("serviceAccountName", "default"),
        **dict.fromkeys(("status.hostIP", "status.hostIPs", "status.podIP", "status.podIPs"), "127.0.0.1"),
    }
    if path not in values:
        raise MissingReference(f"variable {name}: unknown field {path}; use one of {', '.join(values)}")
    return str(values[path])


def _text(value: bytes) -> str:
    return value.decode("utf-8", "surrogateescape")


SHARED_MEMORY = "/dev/shm"
# The characters around a path in a longer argument: `--dir=/ckpt/x`, `a:/ckpt`, but not `/ckpt2` or `my/ckpt`.
_BEFORE = r"(?<![\w./~-])"
_AFTER = r"(?![\w.~-])"


def rewrite_paths(text: str, places: Mapping[str, Path]) -> str:
    """Replace every path of a container by its folder on this machine; the longest mount path takes precedence."""
    if not places or "/" not in text:
        return text
    longest_first = sorted(places, key=len, reverse=True)
    pattern = _BEFORE + "(" + "|".join(map(re.escape, longest_first)) + ")" + _AFTER
    return re.sub(pattern, lambda match: str(places[match[1]]), text)


def prepare_volumes(pod: Object, container: Object, folder: Path, claims: Path, lookup: Lookup) -> dict[str, Path]:
    """Create the folders of all volumes that the container mounts. Returns them by mount path.

    ``folder`` contains the pod's volumes, ``claims`` the claims, which outlive the run. Raises: MissingReference,
    OSError.
    """
    volumes = {volume["name"]: volume for volume in pod["spec"].get("volumes") or ()}
    folders: dict[str, Path | None] = {}
    places: dict[str, Path] = {}
    for mount in container.get("volumeMounts") or ():
        name = mount["name"]
        mount_path = mount["mountPath"].rstrip("/") or "/"
        if mount_path == SHARED_MEMORY:
            continue
        if name not in volumes:
            raise MissingReference(f'volumeMounts: volume "{name}" does not exist; add it to volumes')
        if mount_path == "/":
            raise MissingReference("volumeMounts: a volume at / is not supported on this machine; mount it below /")
        if name not in folders:
            folders[name] = _prepare(volumes[name], folder, claims, lookup)
        source = folders[name]
        if source is None:
            continue
        if sub_path := mount.get("subPath"):
            volume = source
            source = _below(volume, sub_path)
            if not os.path.realpath(source).startswith(os.path.realpath(volume) + os.sep):
                raise MissingReference(
                    f'the path "{sub_path}" leaves its volume through a link; remove the link {source}'
                )
            if not source.exists() and "configMap" not in volumes[name]:
                source.mkdir(parents=True)
        places[mount_path] = source
    return places


def _prepare(volume: Object, pod: Path, claims: Path, lookup: Lookup) -> Path | None:
    """Create one volume's folder; None: the volume is optional and its source does not exist."""
    if host := volume.get("hostPath"):
        return _host_path(host)
    if claim := volume.get("persistentVolumeClaim"):
        folder = _below(claims, claim["claimName"])
        for path in (claims, folder):
            _make_claim_folder(path)
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


def _make_claim_folder(path: Path) -> None:
    """Create a folder unless this user has it. Raises: MissingReference, also for a link, which others can plant."""
    try:
        make_own_folder(path)
    except OSError as error:
        raise MissingReference(
            f"{path} is not a folder of this user ({error.strerror or error}); remove it, or choose another --runs-dir"
        ) from None


def _write_files(folder: Path, data: Mapping[str, bytes], items: Sequence[Object] | None, mode: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    paths = {item["key"]: item["path"] for item in items} if items is not None else {key: key for key in data}
    for key, path in paths.items():
        if key not in data:
            raise MissingReference(f'volume {folder.name}: the source has no key "{key}"; add it, or remove the item')
        target = _below(folder, path)
        target.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data[key])


def _host_path(host: Object) -> Path:
    path = Path(host["path"])
    kind = host.get("type") or ""
    if kind == "DirectoryOrCreate":
        path.mkdir(parents=True, exist_ok=True)
    elif kind == "FileOrCreate":
        path.touch()
    elif not path.exists():
        raise MissingReference(f"hostPath {path}: no such file or folder on this machine; create it")
    return path


def _below(folder: Path, part: str) -> Path:
    """Return a path below a folder. Raises: MissingReference, if it leaves the folder."""
    joined = Path(os.path.normpath(folder / part))
    if os.path.isabs(part) or folder not in joined.parents:
        raise MissingReference(f'the path "{part}" leaves its volume; remove the ".." or the leading "/"')
    return joined


class ClaimInUse(Exception):
    """Another `ddp run` writes to the claim. The text names that process, if known."""


class ClaimLock:
    """The exclusive use of a claim until this process ends: two runs would overwrite each other's checkpoints."""

    def __init__(self, claims: Path, claim: str) -> None:
        """Take the lock. Raises: ClaimInUse, OSError."""
        make_own_folder(claims)
        self._folder = claims / claim
        # Beside the claim's folder, which belongs to the training script. No claim's name starts with a dot.
        self._descriptor = open_plain(claims / f".{claim}.lock", os.O_RDWR | os.O_CREAT, 0o666)
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
        """Return the tracker's run id for the checkpoints of a job on this claim; a new id if the claim is empty.

        Raises: OSError.
        """
        note = self._folder.with_name(f".{self._folder.name}.{job}.run")
        if not note.exists() or not self._folder.is_dir() or not any(self._folder.iterdir()):
            replace_file(note, f"{job}-{os.urandom(4).hex()}")
        with open(note, encoding="utf-8", opener=open_plain) as stream:
            return stream.read(_LONGEST_RUN_ID)

    def sign(self, holder: str) -> None:
        """Write the holder's description, for the message of a run that finds the claim in use."""
        with suppress(OSError):  # a full disk
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, holder.encode(), 0)
