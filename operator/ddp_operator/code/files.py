"""Which files of a folder travel: those that git would add, without secrets."""

import heapq
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from ddp_operator.code.ignore import Rules

IGNORE_FILES: Final = (".gitignore", ".ddpignore")
"""Read in each folder, the later one stronger."""
_NEVER: Final = (".git", ".hg", ".svn", "__pycache__/", ".venv/", ".ipynb_checkpoints/", "ddp-runs/", ".DS_Store")
# The last word of a name, as in .wandb_key, hf_token and gcp-key.json; not of code (token.py) or of a vocabulary
# (tokenizer.json, tokens.txt).
_SECRET_WORDS: Final = (
    *("key", "apikey", "token", "secret", "secrets", "password", "passwd", "passphrase", "credential", "credentials"),
    *("API_KEY", "KEY", "TOKEN", "SECRET", "PASSWORD", "CREDENTIALS"),
)
_SECRET_ENDS: Final = ("", ".txt", ".json", ".y*ml", ".toml", ".ini", ".cfg", ".conf", ".b64")
# What holds passwords, tokens and private keys, by the names that the tools give it.
_SECRET: Final = (
    *(".env", ".env.*", "*.env", "!.env.example", "!.env.sample", "!.env.template"),
    *("*.pem", "*.key", "*.p12", "*.pfx", "*.jks", "*.kdbx", "*.keytab"),
    *("id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*", "!*.pub", ".ssh/", ".gnupg/"),
    *(".netrc", "_netrc", ".pypirc", ".npmrc", ".pgpass", ".git-credentials", ".htpasswd", ".boto", ".s3cfg"),
    *("credentials*.json", "credentials*.y*ml", "*service[-_]account*.json", "client_secret*.json"),
    *("application_default_credentials.json", "secrets.json", "secrets.toml", "secrets.y*ml", ".vault-token"),
    *("kubeconfig", "kubeconfig.*", "*.kubeconfig", ".kube/", ".aws/", ".azure/", "**/.config/gcloud/"),
    *("**/.docker/config.json", ".huggingface/"),
    *(f"{start}{word}{end}" for start in ("", "*[._-]") for word in _SECRET_WORDS for end in _SECRET_ENDS),
)
MOST: Final = 1 << 30
"""Bytes of all files that travel."""
_GUARD: Final = Rules([*_NEVER, *_SECRET])  # asked first, as nearly no name is among them
_NEVER_RULES: Final = Rules(_NEVER)


class CannotPack(ValueError):
    """The folder cannot be packed; the text names the file and the remedy."""


@dataclass(slots=True)
class Selection:
    """The files of a folder that travel, by ``walk``; ``left_out``: secrets that were met and not named."""

    folder: Path
    include: Sequence[str] = ()
    """Files and folders that travel whatever any rule says, as paths below the folder."""
    left_out: list[str] = field(default_factory=list)

    def walk(self) -> Iterator[tuple[str, str]]:
        """Yield the path of each file and symbolic link below the folder, and where that is, always in one order.

        Raises: CannotPack.
        """
        found = self._walk(str(self.folder), "", *_read_outer_rules(self.folder))
        if not self.include:
            yield from found
            return
        named = sorted({path for name in self.include for path in self._list_named(name)}, key=_sort_key)
        last = ""
        for path, place in heapq.merge(found, named, key=_sort_key):
            if path != last:
                yield path, place
            last = path
        self.left_out = [path for path in self.left_out if path.rstrip("/") not in {path for path, _ in named}]

    def _walk(
        self, folder: str, path: str, rules: Sequence[tuple[int, Rules]], prefix: str
    ) -> Iterator[tuple[str, str]]:
        """Walk a folder.

        ``rules``: the innermost first, each with where the paths that are relative to it begin in ``prefix`` + path.
        """
        with _readable(path or folder), os.scandir(folder) as found:
            entries = sorted(found, key=lambda entry: entry.name)
        names = {entry.name for entry in entries}
        if path and "pyvenv.cfg" in names:
            return  # a virtual environment, whatever it is called
        lines = [line for name in IGNORE_FILES if name in names for line in _read_lines(Path(folder, name))]
        if lines:
            rules = [(len(prefix) + len(path), Rules(lines)), *rules]
        for entry in entries:
            name = entry.name
            here, is_folder = path + name, entry.is_dir(follow_symlinks=False)
            if _GUARD.decide(here, name, is_folder=is_folder):
                if not _NEVER_RULES.decide(here, name, is_folder=is_folder):
                    self.left_out.append(here + "/" * is_folder)
                continue
            whole = prefix + here
            for begin, one in rules:
                ignored = one.decide(whole[begin:], name, is_folder=is_folder)
                if ignored is not None:
                    break
            else:
                ignored = False
            if ignored:
                continue
            if is_folder:
                yield from self._walk(entry.path, f"{here}/", rules, prefix)
            elif entry.is_file(follow_symlinks=False) or entry.is_symlink():
                yield here, entry.path

    def _list_named(self, name: str) -> Iterator[tuple[str, str]]:
        path = _find_named(self.folder, name)
        place = self.folder / path
        if not place.is_dir() or place.is_symlink():
            yield path, str(place)
            return
        for folder, _, files in os.walk(place):
            for file in files:
                yield os.path.relpath(os.path.join(folder, file), self.folder), os.path.join(folder, file)


def copy_files(folder: Path, target: Path, linked: Sequence[str] = ()) -> int:
    """Copy the files that would travel into ``target``, and link those of ``linked``; return how many were copied.

    Raises: CannotPack, OSError.
    """
    if not folder.is_dir():
        raise CannotPack(f"{folder}: there is no such folder")
    links = {_find_named(folder, name): folder / name for name in linked}
    count = 0
    total = 0
    for path, place in Selection(folder).walk():
        if any(path == link or path.startswith(f"{link}/") for link in links):
            continue
        total += os.lstat(place).st_size
        if total > MOST:
            raise CannotPack(
                f"{folder} has more than {MOST >> 20} MiB; name data in .ddpignore, and link it with --include PATH"
            )
        copy = target / path
        copy.parent.mkdir(parents=True, exist_ok=True)
        if os.path.islink(place):
            copy.symlink_to(_read_target(folder, place))
        else:
            shutil.copy2(place, copy)
        count += 1
    for link, source in links.items():
        copy = target / link
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.symlink_to(source.absolute())
    return count


def _read_target(folder: Path, place: str) -> str:
    """Return where a link of the copy points: within the copy where it points into the folder."""
    target = os.readlink(place)
    resolved = os.path.realpath(place)
    if os.path.commonpath([os.path.realpath(folder), resolved]) != os.path.realpath(folder):
        return resolved
    return os.path.relpath(resolved, os.path.realpath(os.path.dirname(place))) if os.path.isabs(target) else target


def _find_named(folder: Path, name: str) -> str:
    """Return the path below the folder that --include names. Raises: CannotPack."""
    path = os.path.normpath(os.path.relpath(folder / name, folder))
    if path.startswith("..") or not os.path.lexists(folder / path):
        raise CannotPack(f"--include {name}: there is no such file or folder in {folder}")
    return path


def _sort_key(found: tuple[str, str]) -> list[str]:
    return found[0].split("/")


def _read_outer_rules(folder: Path) -> tuple[list[tuple[int, Rules]], str]:
    """Return the rules that a git repository has above ``folder``, and the path of that in the repository."""
    folder = folder.resolve()
    root = next((one for one in (folder, *folder.parents) if (one / ".git").exists()), None)
    if root is None:
        return [], ""
    rules = [(0, Rules(_read_lines(root / ".git" / "info" / "exclude")))]
    parts = folder.relative_to(root).parts
    for end in range(len(parts)):  # its own are read on the way
        above = "".join(f"{part}/" for part in parts[:end])
        lines = [line for name in IGNORE_FILES for line in _read_lines(root / above / name)]
        rules.insert(0, (len(above), Rules(lines)))
    return rules, "".join(f"{part}/" for part in parts)


def _read_lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return []


@contextmanager
def _readable(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CannotPack(f"{path}: {error.strerror}; make it readable, or name it in .ddpignore") from None
