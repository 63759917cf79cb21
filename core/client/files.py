"""Files on their way to the API: opened, counted, named."""

from __future__ import annotations

import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from core.errors import Invalid, NotFound

Progress = Callable[[int, int], None]
HEAD_BYTES = 1 << 20
# Tables have their columns at the end, and packed files cannot be unpacked without it.
_WHOLE = (b"PAR1", b"ARROW1", b"\xff\xff\xff\xff", b"\x1f\x8b", b"\x28\xb5\x2f\xfd")


def head_of(file: BinaryIO) -> bytes:
    """As much of a file as tells how it is read: its first MiB, or all of it where that is not enough."""
    file.seek(0)
    head = file.read(HEAD_BYTES)
    return head + file.read() if head.startswith(_WHOLE) else head


class Counted:
    """A file that reports how much of it has been read."""

    def __init__(self, file: BinaryIO, on_progress: Progress) -> None:
        self._file = file
        self._on_progress = on_progress
        self._total = file.seek(0, 2)
        file.seek(0)

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self._on_progress(self._file.tell(), self._total)
        return data

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()


@contextmanager
def opened(
    source: str | Path | BinaryIO, filename: str | None, *, zip_folders: bool = False
) -> Iterator[tuple[BinaryIO, str]]:
    """The open file and the name it goes by; a folder (where that is allowed) as a zip of its files."""
    if not isinstance(source, str | Path):
        yield source, filename or Path(str(getattr(source, "name", "upload"))).name
        return
    path = Path(source).expanduser()
    if not path.exists():
        raise NotFound("file_not_found", f"there is no file {path}; check the path", "source")
    if zip_folders and path.suffix == ".safetensors":
        with _zipped([path, path.with_name("adapter_config.json")]) as file:
            yield file, f"{filename or path.stem}.zip"
        return
    if not path.is_dir():
        with path.open("rb") as file:
            yield file, filename or path.name
        return
    if not zip_folders:
        raise Invalid("not_a_file", f"{path} is a folder; give the file itself", "source")
    with _zipped([member for member in sorted(path.iterdir()) if member.is_file()]) as file:
        yield file, f"{filename or path.resolve().name}.zip"


@contextmanager
def _zipped(members: Sequence[Path]) -> Iterator[BinaryIO]:
    """The files that there are, as one."""
    with tempfile.TemporaryFile() as file:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
            for member in members:
                if member.is_file():
                    archive.write(member, member.name)
        yield file
