"""Folders, zips and tars as a set of members, none of which may lead out of where it is put.

Everything about an archive is checked before any of it is written: names, kinds, sizes. One bad member refuses it all.
"""

from __future__ import annotations

import gzip
import io
import lzma
import re
import shutil
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from core.errors import Invalid, NotFound

MAX_MEMBERS = 10_000
# What the two modules raise for damaged archives, their own kinds and those that they let through.
_DAMAGED = (
    zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError, struct.error, EOFError, OSError, ValueError,
    OverflowError, LookupError, RuntimeError, NotImplementedError,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Members:
    """`sizes`: bytes of each file, by its path with forward slashes; `extract` writes some of them to paths given."""

    sizes: Mapping[str, int]
    extract: Callable[[Mapping[str, Path]], None]


@contextmanager
def opened(source: Path, *, max_bytes: int, title: str) -> Iterator[Members]:
    """The members of a folder, a zip, a tar or a gzipped tar, told by content. `title` is what errors call it.

    Raises NotFound when there is none; Invalid for absolute paths, paths with ``..``, links and devices, for more than
    `max_bytes` of contents or 10,000 members, and for damaged archives.
    """
    if not source.exists():
        raise NotFound("file_missing", f"There is no file or folder {source}. Give the path of one.", "file")
    try:
        if source.is_dir():
            yield _folder(source, max_bytes)
        elif zipfile.is_zipfile(source):
            with zipfile.ZipFile(source) as file:
                yield _zip(file, title, max_bytes)
        else:
            yield _tar(source, title, max_bytes)
    except _DAMAGED as error:
        raise Invalid(
            "archive_damaged",
            f"{title} cannot be read ({error}). Upload a zip, a tar or a tar.gz, packed without a password.",
            "file",
        ) from error


def _check(entries: Iterator[tuple[str, int, str]], source: str, max_bytes: int) -> dict[str, int]:
    """Sizes of the (name, bytes, kind) entries that are files, when all of them are harmless."""
    sizes: dict[str, int] = {}
    total = 0
    for count, (name, size, kind) in enumerate(entries, 1):
        if kind not in ("file", "folder"):
            raise _unsafe(source, name, f"is a {kind}")
        if name.startswith(("/", "\\")) or re.match(r"[A-Za-z]:", name) or "\0" in name:
            raise _unsafe(source, name, "has an absolute path")
        path = name.replace("\\", "/").removeprefix("./")
        if ".." in path.split("/"):
            raise _unsafe(source, name, "leads out of the archive")
        total += size
        if total > max_bytes or count > MAX_MEMBERS:
            raise Invalid(
                "archive_too_large",
                f"{source} holds more than {max_bytes:,} bytes or {MAX_MEMBERS:,} files when unpacked. Leave out what "
                "is no part of the adapter (optimizer state, checkpoints).",
                "file",
            )
        if kind == "file":
            if path in sizes:
                raise _unsafe(source, name, "is there twice")
            sizes[path] = size
    return sizes


def _unsafe(source: str, name: str, why: str) -> Invalid:
    return Invalid(
        "archive_unsafe",
        f"{source} is refused as a whole: its member {name!r} {why}. Pack plain files under relative paths.",
        "file",
    )


def _write(file: IO[bytes], path: Path) -> None:
    with path.open("xb") as output:
        shutil.copyfileobj(file, output, 1 << 20)


# ---- kinds -----------------------------------------------------------------------------------------------------------


def _folder(folder: Path, max_bytes: int) -> Members:
    def entries() -> Iterator[tuple[str, int, str]]:
        for path in folder.rglob("*"):
            kind = "link" if path.is_symlink() else "folder" if path.is_dir() else "file"
            if kind == "file" and not path.is_file():
                kind = "device"
            yield path.relative_to(folder).as_posix(), path.stat().st_size if kind == "file" else 0, kind

    def extract(wanted: Mapping[str, Path]) -> None:
        for name, path in wanted.items():
            with (folder / name).open("rb") as file:
                _write(file, path)

    return Members(_check(entries(), folder.name, max_bytes), extract)


def _zip(file: zipfile.ZipFile, source: str, max_bytes: int) -> Members:
    def entries() -> Iterator[tuple[str, int, str]]:
        for member in file.infolist():
            mode = member.external_attr >> 16
            kind = "folder" if member.is_dir() else "file"
            if stat.S_IFMT(mode) not in (0, stat.S_IFREG, stat.S_IFDIR):
                kind = "link" if stat.S_ISLNK(mode) else "device"
            yield member.orig_filename, member.file_size, kind

    def extract(wanted: Mapping[str, Path]) -> None:
        for member in file.infolist():
            path = wanted.get(member.orig_filename.replace("\\", "/").removeprefix("./"))
            if path is not None and not member.is_dir():
                with file.open(member) as content:
                    _write(content, path)

    return Members(_check(entries(), source, max_bytes), extract)


def _tar(source: Path, title: str, max_bytes: int) -> Members:
    def entries() -> Iterator[tuple[str, int, str]]:
        for member, _ in _tar_members(source, title, max_bytes):
            kind = "folder" if member.isdir() else "file" if member.isreg() and not member.issparse() else "device"
            yield member.name, member.size, "link" if member.issym() or member.islnk() else kind

    def extract(wanted: Mapping[str, Path]) -> None:
        for member, tar in _tar_members(source, title, max_bytes):
            path = wanted.get(member.name.replace("\\", "/").removeprefix("./"))
            content = tar.extractfile(member) if path is not None else None
            if path is not None and content is not None:
                _write(content, path)

    return Members(_check(entries(), title, max_bytes), extract)


def _tar_members(source: Path, title: str, max_bytes: int) -> Iterator[tuple[tarfile.TarInfo, tarfile.TarFile]]:
    with source.open("rb") as raw:
        packed = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        content: Any = gzip.GzipFile(fileobj=raw) if packed else raw
        # Headers and padding take up to 1.5 KiB a member; a header itself can claim any size.
        limited = _Limited(content, max_bytes + MAX_MEMBERS * 1536 + (1 << 20), title)
        with tarfile.open(fileobj=limited, mode="r|") as tar:
            for member in tar:
                yield member, tar


class _Limited(io.RawIOBase):
    """A stream that ends in Invalid when more is read from it than an archive of the permitted size can have."""

    def __init__(self, content: Any, limit: int, source: str) -> None:
        super().__init__()
        self._content, self._left, self._source = content, limit, source

    def read(self, size: int = -1) -> bytes:
        data: bytes = self._content.read(size)
        self._left -= len(data)
        if self._left < 0:
            raise Invalid(
                "archive_too_large",
                f"{self._source} unpacks to more than is permitted. Leave out what is no part of the adapter.",
                "file",
            )
        return data
