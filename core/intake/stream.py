"""The bytes of an uploaded file, unpacked where its content is gzip or zstd."""

from __future__ import annotations

import gzip
import io
import zlib
from pathlib import Path
from typing import IO, Any

import pyarrow as pa

from core.errors import Invalid

MAX_EXPANDED_BYTES = 16 << 30
PACKINGS = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}


def too_expanded(filename: str) -> Invalid:
    """For what takes far more room unpacked than in the file."""
    return Invalid(
        "too_large",
        f"{filename} unpacks to more than {MAX_EXPANDED_BYTES >> 30} GiB. Split it into smaller files.",
        "file",
    )


class Stream(io.RawIOBase):
    """Readable unpacked bytes. `packing` is gzip, zstd or empty; `position` the bytes of the file itself read so far,
    `expanded` the unpacked ones. A damaged file and one that unpacks to more than 16 GiB raise Invalid on reading.
    """

    def __init__(self, path: Path, filename: str) -> None:
        super().__init__()
        self._filename = filename
        self._file: IO[bytes] = path.open("rb")
        magic = self._file.read(4)
        self._file.seek(0)
        self.packing = next((name for start, name in PACKINGS.items() if magic.startswith(start)), "")
        self.expanded = 0
        self._source: Any = self._file
        if self.packing == "gzip":
            self._source = gzip.GzipFile(fileobj=self._file)
        elif self.packing == "zstd":
            self._source = pa.CompressedInputStream(pa.PythonFile(self._file, mode="r"), "zstd")

    @property
    def position(self) -> int:
        return 0 if self._file.closed else self._file.tell()

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        try:
            data: bytes = self._source.read(size)
        except (OSError, EOFError, zlib.error) as error:
            raise Invalid(
                "damaged_archive",
                f"{self._filename} is a {self.packing} file that is damaged after {self.expanded:,} unpacked bytes "
                f"({error}). Pack and upload it again.",
                "file",
            ) from error
        self.expanded += len(data)
        if self.expanded > MAX_EXPANDED_BYTES:
            raise too_expanded(self._filename)
        return data

    def readinto(self, buffer: Any) -> int:
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._source.close()
            self._file.close()
        super().close()
