"""Volumes become folders, and paths in arguments refer to them."""

from pathlib import Path
from typing import Any

import pytest

from ddp_cli.local.container import MissingReference, prepare_volumes, rewrite_paths

CONFIG = {"kind": "ConfigMap", "metadata": {"name": "c"}, "data": {"a.yaml": "A", "b.yaml": "B"}}


def prepare(tmp_path: Path, source: dict[str, Any], **mount: Any) -> dict[str, Path]:
    pod = {"spec": {"volumes": [{"name": "v", **source}]}}
    container = {"volumeMounts": [{"name": "v", "mountPath": "/in", **mount}]}
    folders = tmp_path / "pod", tmp_path / "claims"
    return prepare_volumes(pod, container, *folders, lambda kind, name: CONFIG if name == "c" else None)


@pytest.mark.parametrize(
    ("text", "rewritten"),
    [
        ("/data", "/X"),
        ("/data/", "/X/"),
        ("--dir=/data/train", "--dir=/X/train"),
        ("/data:/ckpt", "/X:/Y"),
        ("/data/deep/x", "/Z/x"),
        ("/data2", "/data2"),
        ("/data.old", "/data.old"),
        ("my/data", "my/data"),
        ("~/data", "~/data"),
        ("gs://bucket/data", "gs://bucket/data"),
        ("no path", "no path"),
    ],
)
def test_mount_paths_are_rewritten_only_as_whole_paths(text: str, rewritten: str) -> None:
    places = {"/data": Path("/X"), "/ckpt": Path("/Y"), "/data/deep": Path("/Z")}
    assert rewrite_paths(text, places) == rewritten


def test_claims_belong_to_this_user_alone(tmp_path: Path) -> None:
    claim = {"persistentVolumeClaim": {"claimName": "ckpt"}}
    prepare(tmp_path, claim)
    assert (tmp_path / "claims").stat().st_mode & 0o777 == 0o700
    other = tmp_path / "other"
    other.mkdir()
    (other / "claims").symlink_to(tmp_path / "claims")
    with pytest.raises(MissingReference, match="claims is not a folder of this user"):
        prepare(other, claim)


@pytest.mark.parametrize("kind", ["link", "dangling link", "file", "link below"])
def test_link_in_the_place_of_a_claim_is_not_followed(tmp_path: Path, kind: str) -> None:
    claim = {"persistentVolumeClaim": {"claimName": "ckpt"}}
    place = tmp_path / "claims" / "ckpt" / "run" if kind == "link below" else tmp_path / "claims" / "ckpt"
    place.parent.mkdir(parents=True)
    (tmp_path / "victim").mkdir()
    if kind == "file":
        place.touch()
    else:
        place.symlink_to(tmp_path / ("none" if kind == "dangling link" else "victim"))
    sub_path = {"subPath": "run"} if kind == "link below" else {}
    with pytest.raises(MissingReference, match=r"is not a folder of this user .* remove it|leaves its volume"):
        prepare(tmp_path, claim, **sub_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["claims", "victim"]


@pytest.mark.parametrize("source", [{"emptyDir": {}}, {"emptyDir": {"medium": "Memory"}}, {}])
def test_empty_dir_is_folder_of_pod(tmp_path: Path, source: dict[str, Any]) -> None:
    places = prepare(tmp_path, source)
    assert rewrite_paths("/in", places) == str(tmp_path / "pod" / "v")
    assert (tmp_path / "pod" / "v").is_dir()


def test_items_choose_and_rename_keys(tmp_path: Path) -> None:
    items = [{"key": "a.yaml", "path": "deep/x.yaml"}]
    folder = Path(rewrite_paths("/in", prepare(tmp_path, {"configMap": {"name": "c", "items": items}})))
    assert [path.relative_to(folder).as_posix() for path in folder.rglob("*.yaml")] == ["deep/x.yaml"]


def test_sub_path_of_config_map_is_file(tmp_path: Path) -> None:
    places = prepare(tmp_path, {"configMap": {"name": "c"}}, mountPath="/etc/a.yaml", subPath="a.yaml")
    assert Path(rewrite_paths("/etc/a.yaml", places)).read_text() == "A"


def test_host_path_is_itself_and_must_exist(tmp_path: Path) -> None:
    assert rewrite_paths("/in/x", prepare(tmp_path, {"hostPath": {"path": str(tmp_path)}})) == f"{tmp_path}/x"
    with pytest.raises(MissingReference, match="no such file or folder"):
        prepare(tmp_path, {"hostPath": {"path": str(tmp_path / "none")}})
    prepare(tmp_path, {"hostPath": {"path": str(tmp_path / "none"), "type": "DirectoryOrCreate"}})
    assert (tmp_path / "none").is_dir()


def test_missing_secret_is_refused_and_optional_one_creates_no_folder(tmp_path: Path) -> None:
    with pytest.raises(MissingReference, match='Secret "s" is not in the file'):
        prepare(tmp_path, {"secret": {"secretName": "s"}})
    assert prepare(tmp_path, {"secret": {"secretName": "s", "optional": True}}) == {}


@pytest.mark.parametrize("part", ["../x", "/x", ".."])
def test_path_cannot_leave_its_volume(tmp_path: Path, part: str) -> None:
    with pytest.raises(MissingReference, match="leaves its volume"):
        prepare(tmp_path, {"emptyDir": {}}, subPath=part)
    with pytest.raises(MissingReference, match="leaves its volume"):
        prepare(tmp_path, {"persistentVolumeClaim": {"claimName": part}})
