"""Archives that a container's content filled, on the host. No daemon."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from rl360.sandboxes.docker import archives


def archive(path: Path, *entries: tuple[str, str | None, dict[str, object]]) -> Path:
    """(name, content or None, TarInfo fields) for each entry."""
    with tarfile.open(path, "w") as tar:
        for name, content, fields in entries:
            info = tarfile.TarInfo(name)
            data = (content or "").encode()
            info.size = len(data)
            for key, value in fields.items():
                setattr(info, key, value)
            tar.addfile(info, io.BytesIO(data))
    return path


FOLDER: dict[str, object] = {"type": tarfile.DIRTYPE, "mode": 0o755}


def link(target: str) -> dict[str, object]:
    return {"type": tarfile.SYMTYPE, "linkname": target}


def hard(target: str) -> dict[str, object]:
    return {"type": tarfile.LNKTYPE, "linkname": target}


def files(folder: Path) -> dict[str, str]:
    return {str(p.relative_to(folder)): p.read_text() for p in folder.rglob("*") if p.is_file()}


def test_unpacking_makes_regular_files_only(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("host")
    made = archive(
        tmp_path / "a.tar",
        ("d", None, FOLDER), ("d/f", "one", {}), ("d/sub/g", "two", {"mode": 0o4755}), ("d/l", None, link("sub/g")),
        ("d/h", None, hard("d/f")), ("d/out", None, link(str(tmp_path / "secret"))), ("d/up", None, link("../../x")),
        ("d/pipe", None, {"type": tarfile.FIFOTYPE}), ("d/dev", None, {"type": tarfile.CHRTYPE}),
        ("d/../../evil", "no", {}), ("d/empty", None, FOLDER),
    )  # fmt: skip
    skipped = archives.unpack_folder(made, tmp_path / "t")
    assert files(tmp_path / "t") == {"f": "one", "sub/g": "two", "l": "two", "h": "one"}
    assert sorted(skipped) == ["d/../../evil", "dev", "out", "pipe", "up"]
    assert (tmp_path / "t/empty").is_dir()
    assert (tmp_path / "t/sub/g").stat().st_mode & 0o7777 == 0o755
    assert not (tmp_path / "evil").exists()


def test_what_stands_in_the_way_is_never_written_through(tmp_path: Path) -> None:
    (tmp_path / "host").write_text("before")
    (tmp_path / "t").mkdir()
    (tmp_path / "t/f").symlink_to(tmp_path / "host")
    archives.unpack_folder(archive(tmp_path / "a.tar", ("d", None, FOLDER), ("d/f", "x", {})), tmp_path / "t")
    assert (tmp_path / "host").read_text() == "before"
    assert (tmp_path / "t/f").read_text() == "x"
    # the same name as file and as folder
    clash = archive(tmp_path / "b.tar", ("d", None, FOLDER), ("d/a", "file", {}), ("d/a/b", "below a file", {}))
    assert archives.unpack_folder(clash, tmp_path / "u") == ["a/b"]


def test_one_file(tmp_path: Path) -> None:
    archives.unpack_file(archive(tmp_path / "a.tar", ("f", "x", {})), tmp_path / "deep/er/g")
    assert (tmp_path / "deep/er/g").read_text() == "x"
    with pytest.raises(FileNotFoundError):
        archives.unpack_file(archive(tmp_path / "b.tar", ("f", None, link("/etc/passwd"))), tmp_path / "h")


def test_carrying(tmp_path: Path) -> None:
    made = archive(
        tmp_path / "a.tar",
        ("work", None, {**FOLDER, "uid": 7}), ("work/f", "one", {"mode": 0o6755, "uid": 7, "gid": 8, "mtime": 9}),
        ("work/in", None, link("f")), ("work/h", None, hard("work/f")), ("work/out", None, link("/etc/passwd")),
        ("work/up", None, link("../x")), ("work/dev", None, {"type": tarfile.BLKTYPE}), ("work/x.log", "log", {}),
        ("work/node_modules/m", "m", {}), ("work/d/abs", None, link("/srv/work/f")),
        ("work/root", None, link("/srv/work")), ("work/d/loop", None, link("..")),
        ("work/d/sly", None, link("loop/../../etc/passwd")),
    )  # fmt: skip
    refused = archives.carry(made, "/srv/work", tmp_path / "b.tar", ("*.log", "node_modules"))
    assert refused == ["out", "up", "dev", "d/sly"]
    with tarfile.open(tmp_path / "b.tar") as tar:
        names = {m.name: m for m in tar}
    kept = ["", "/d/abs", "/d/loop", "/f", "/h", "/in", "/root"]
    assert sorted(names) == [f"srv/work{name}" for name in kept]
    links = {name: names[f"srv/work{name}"].linkname for name in ("/d/abs", "/d/loop", "/in", "/root")}
    assert links == {"/d/abs": "../f", "/d/loop": "..", "/in": "f", "/root": "."}
    f = names["srv/work/f"]
    assert (f.mode, f.uid, f.gid, f.mtime, f.size) == (0o755, 7, 8, 9, 3)
    assert names["srv/work/h"].linkname == "srv/work/f"


def test_carrying_a_file_and_what_is_no_folder(tmp_path: Path) -> None:
    assert archives.carry(archive(tmp_path / "a.tar", ("f", "x", {})), "/data/f", tmp_path / "b.tar") == []
    with tarfile.open(tmp_path / "b.tar") as tar:
        assert [m.name for m in tar] == ["data/f"]
    linked = archive(tmp_path / "c.tar", ("f", None, link("/etc")))
    assert archives.carry(linked, "/data/f", tmp_path / "d.tar") == ["/data/f"]
