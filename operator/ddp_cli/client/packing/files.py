"""Select the files of a folder to pack: those that git would add, without secrets."""

import codecs
import os
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from ddp_cli.client.packing.ignore import Rules
from ddp_cli.client.packing.secrets import NAMES, has_secret
from ddp_pod.contract.plain_files import open_plain

IGNORE_FILES: Final = (".gitignore", ".ddpignore")
"""Read in each folder; rules of the later file take precedence."""
_NEVER: Final = (".git", ".hg", ".svn", "__pycache__/", ".venv/", ".ipynb_checkpoints/", "ddp-runs/", ".ds_store")
_MOST_PATH: Final = 8192
_GIT_SECONDS: Final = 20.0
_MOST_RULES: Final = 256 << 10
"""Maximum size of a file with rules in bytes."""
MOST: Final = 1 << 30
"""Maximum size of all packed files in bytes."""
MOST_FILES: Final = 300_000
"""Maximum number of packed files; the memory that a pod has for their names suffices for 250 characters each."""
_GUARD: Final = Rules([*_NEVER, *NAMES])  # checked first, because few names match
_NEVER_RULES: Final = Rules(_NEVER)
_RUN_FILES: Final = frozenset(("job.yaml", "objects.yaml", "command.txt"))


class CannotPack(ValueError):
    """The folder cannot be packed; the text names the file and the remedy."""


@dataclass(slots=True)
class Selection:
    """The files of a folder to pack, by ``walk``; ``left_out``: possible secrets that ``include`` does not name.

    ``on_machine``: to copy on this machine: also secrets, files that only git ignores, and folders.
    """

    folder: Path
    include: Sequence[str] = ()
    """Files and folders that are packed regardless of all rules, as paths below the folder."""
    left_out: list[str] = field(default_factory=list)
    on_machine: bool = False

    def walk(self) -> Iterator[tuple[str, str]]:
        """Yield each file and symbolic link as its path below the folder and its real path, in a fixed order.

        Raises: CannotPack.
        """
        outer = ([], "") if self.on_machine else _read_outer_rules(self.folder)
        selected = self._walk(str(self.folder), "", *outer)
        if not self.include:
            yield from selected
            return
        named = dict(item for name in self.include for item in self._list_named(name))
        yield from sorted({**dict(selected), **named}.items(), key=_sort_key)
        self.left_out = [path for path in self.left_out if path.rstrip("/") not in named]

    def _walk(
        self, folder: str, path: str, rules: Sequence[tuple[int, Rules]], prefix: str
    ) -> Iterator[tuple[str, str]]:
        """Walk a folder.

        ``rules``: the innermost first, each with the start of its relative paths in ``prefix`` + path.
        """
        try:
            with os.scandir(folder) as scan:
                entries = sorted(scan, key=lambda entry: entry.name)
        except OSError as error:
            problem = f"{error.strerror}; make it readable, or name it in .ddpignore"
            raise CannotPack(f"{path or folder}: {problem}") from None
        names = {entry.name for entry in entries}
        if path and ("pyvenv.cfg" in names or names >= _RUN_FILES):
            return  # a virtual environment of any name, or the folder of a run
        ignore_files = IGNORE_FILES[1:] if self.on_machine else IGNORE_FILES
        guard = _NEVER_RULES if self.on_machine else _GUARD
        if not names.isdisjoint(ignore_files):
            rules = [(len(prefix) + len(path), _read_rules(Path(folder), ignore_files)), *rules]
        for entry in entries:
            name = entry.name
            entry_path = path + name
            is_folder = entry.is_dir(follow_symlinks=False)
            if guard.decide(entry_path.lower(), name.lower(), is_folder=is_folder):
                if not _NEVER_RULES.decide(entry_path.lower(), name.lower(), is_folder=is_folder):
                    self.left_out.append(f"{entry_path}/" if is_folder else entry_path)
                continue
            if _is_ignored(rules, prefix + entry_path, name, is_folder=is_folder):
                continue
            if is_folder:
                if self.on_machine:
                    yield f"{entry_path}/", entry.path  # it may be empty, and the script may write to it
                yield from self._walk(entry.path, f"{entry_path}/", rules, prefix)
            elif not self.on_machine and has_secret(entry.path):
                self.left_out.append(entry_path)
            elif entry.is_file(follow_symlinks=False) or entry.is_symlink():
                yield entry_path, entry.path

    def _list_named(self, name: str) -> Iterator[tuple[str, str]]:
        path = _find_named(self.folder, name)
        place = self.folder / path
        if not place.is_dir() or place.is_symlink():
            yield path, str(place)
            return
        for folder, _, files in os.walk(place):
            for file in files:
                yield os.path.relpath(os.path.join(folder, file), self.folder), os.path.join(folder, file)


def _find_named(folder: Path, name: str) -> str:
    """Return the path below the folder that --include names. Raises: CannotPack."""
    path = os.path.normpath(os.path.relpath(folder / name, folder))
    if path.startswith("..") or not os.path.lexists(folder / path):
        raise CannotPack(f"--include {name}: no such file or folder in {folder}; name a path relative to it")
    return path


def _is_ignored(rules: Sequence[tuple[int, Rules]], path: str, name: str, *, is_folder: bool) -> bool:
    """Return whether the first rules that match a path ignore it."""
    for start, folder_rules in rules:
        ignored = folder_rules.decide(path[start:], name, is_folder=is_folder)
        if ignored is not None:
            return ignored
    return False


def _sort_key(item: tuple[str, str]) -> list[str]:
    return item[0].split("/")


def _read_outer_rules(folder: Path) -> tuple[list[tuple[int, Rules]], str]:
    """Return the rules of a git repository above ``folder``, and the folder's path in the repository."""
    folder = folder.resolve()
    root = next((parent for parent in (folder, *folder.parents) if (parent / ".git").exists()), None)
    if root is None:
        return [], ""
    names = (_find_global_rules(root), str(_find_git_folder(root) / "info" / "exclude"))
    rules = [(0, _read_rules(root, names))]
    parts = folder.relative_to(root).parts
    for end in range(len(parts)):  # the walk reads the folder's own rules
        above = "".join(f"{part}/" for part in parts[:end])
        rules.insert(0, (len(above), _read_rules(root / above)))
    return rules, "".join(f"{part}/" for part in parts)


def _find_git_folder(root: Path) -> Path:
    """Return the folder that the worktrees of a repository share. ``.git`` of a worktree or submodule names its own."""
    named = _read_start(str(root / ".git"), _MOST_PATH).removeprefix(b"gitdir:").strip()
    folder = root / os.fsdecode(named or b".git")
    return folder / os.fsdecode(_read_start(str(folder / "commondir"), _MOST_PATH).strip())


def _find_global_rules(root: Path) -> str:
    """Return the file of the user's rules for all repositories, as git finds it."""
    default = os.path.join(os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config"), "git", "ignore")
    words = ("git", "-C", str(root), "config", "--type=path", "--default", default, "core.excludesFile")
    try:
        named = subprocess.run(words, capture_output=True, timeout=_GIT_SECONDS, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return default
    return os.fsdecode(named.removesuffix(b"\n"))


def _read_rules(folder: Path, names: Sequence[str] = IGNORE_FILES) -> Rules:
    """Return the rules of a folder's files; none for a file that does not exist. Raises: CannotPack."""
    lines = []
    for name in names:
        # A link is followed: .ddpignore may be one to .dockerignore.
        text = _read_start(os.path.realpath(folder / name), _MOST_RULES + 1)
        if len(text) > _MOST_RULES:
            raise CannotPack(f"{folder / name} has more than {_MOST_RULES >> 10} KiB; remove lines")
        if b"\0" in text:
            raise CannotPack(f"{folder / name} has zero bytes, as text in UTF-16 has; save it as UTF-8")
        lines += os.fsdecode(text.removeprefix(codecs.BOM_UTF8)).split("\n")
    try:
        return Rules(lines)
    except ValueError as error:
        raise CannotPack(f"{folder}: {' or '.join(names)}: {error}") from None


def _read_start(path: str, size: int) -> bytes:
    """Return the first bytes of a regular file; none of any other file, or of one that cannot be read."""
    try:
        with open(open_plain(path, os.O_RDONLY), "rb") as file:
            return file.read(size)
    except OSError:
        return b""
