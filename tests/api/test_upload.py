"""Uploads are streamed, bounded, and leave nothing when they fail."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from core.config import Settings
from tests.api.serving import headers
from tests.control import files
from tests.stack import until

BOUNDARY = "frontier"
HEADERS = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}


def part(data: bytes, name: str = "file", filename: str | None = "rivers.jsonl") -> bytes:
    shown = f'; filename="{filename}"' if filename is not None else ""
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"{shown}\r\n\r\n'
    return head.encode() + data + b"\r\n"


END = f"--{BOUNDARY}--\r\n".encode()


@pytest.fixture
def rivers(tmp_path: Path) -> bytes:
    return files.jsonl(tmp_path / "rivers.jsonl").read_bytes()


def post(http: httpx.Client, body: bytes | Iterator[bytes], name: str = "rivers", **params: object) -> httpx.Response:
    return http.post("/api/datasets", params={"name": name, **params}, content=body, headers=HEADERS)


def head(settings: Settings, length: int, more: str = "") -> bytes:
    """Of a request that declares a body of so many bytes; `more`: header lines."""
    return (
        f"POST /api/datasets?name=rivers HTTP/1.1\r\nHost: localhost\r\n{more}"
        f"Authorization: {headers(settings)['Authorization']}\r\n"
        f"Content-Type: {HEADERS['Content-Type']}\r\nContent-Length: {length}\r\n\r\n"
    ).encode()


def leaves_nothing(settings: Settings) -> bool:
    return not any(any((settings.data_dir / folder).iterdir()) for folder in ("uploads", "datasets", "adapters"))


def test_a_file_arrives_whole_in_whatever_pieces(http: httpx.Client, rivers: bytes, settings: Settings) -> None:
    body = part(b"beside", "note", None) + part(rivers) + END
    response = post(http, (body[at : at + 7] for at in range(0, len(body), 7)))
    assert response.status_code == 201, response.text
    made = response.json()
    assert (made["bytes"], made["sha256"]) == (len(rivers), hashlib.sha256(rivers).hexdigest())
    assert made["report"]["rows"] == 8
    assert not any((settings.data_dir / "uploads").iterdir())


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (END, "file_missing"),
        (part(b"x", "other") + END, "file_missing"),
        (part(b"x") + part(b"y") + END, "one_file"),
        (part(b"x"), "multipart_broken"),
        (b"not multipart at all", "multipart_broken"),
        (b"", "multipart_broken"),
        (part(b"") + END, "empty_file"),
        (part(b"\x80\x04pickle") + END, None),
    ],
)
def test_a_body_that_is_no_such_form_is_refused(
    http: httpx.Client, settings: Settings, body: bytes, code: str | None
) -> None:
    response = post(http, body)
    assert response.status_code == 422, response.text
    assert code in (None, response.json()["error"]["code"])
    assert leaves_nothing(settings)


def test_a_body_of_another_type_is_refused(http: httpx.Client) -> None:
    response = http.post("/api/datasets", params={"name": "x"}, json={})
    assert (response.status_code, response.json()["error"]["code"]) == (422, "multipart_expected")


def test_a_refused_file_comes_with_what_was_found(http: httpx.Client, settings: Settings, rivers: bytes) -> None:
    response = post(http, part(rivers + b'{"broken\n') + END)
    assert response.status_code == 422
    body = response.json()
    assert "9" in body["error"]["message"]
    assert body["report"]["rows_read"] == 9
    assert leaves_nothing(settings)


def test_what_is_declared_too_large_is_refused_unread(settings: Settings) -> None:
    with socket.create_connection(("127.0.0.1", settings.api_port), 10) as connection:
        connection.sendall(head(settings, 99_999_999))
        answer = connection.recv(4096)
    assert answer.startswith(b"HTTP/1.1 413")
    assert leaves_nothing(settings)


@pytest.mark.parametrize("name", ["file", "beside"])
def test_what_turns_out_too_large_is_refused_while_it_comes(http: httpx.Client, settings: Settings, name: str) -> None:
    sent = 0

    def endless() -> Iterator[bytes]:
        nonlocal sent
        yield part(b"", name)[:-2]
        while True:
            sent += 1 << 16
            yield b"x" * (1 << 16)

    response = post(http, endless())
    assert response.status_code == 413
    assert "1048576 bytes" in response.json()["error"]["message"]
    assert "HARLI_MAX_UPLOAD_MIB" in response.json()["error"]["message"]
    assert sent < 64 << 20
    assert leaves_nothing(settings)


@pytest.mark.parametrize("kind", ["datasets", "adapters"])
def test_a_taken_name_is_refused_before_the_body_is_read(
    http: httpx.Client, settings: Settings, rivers: bytes, tmp_path: Path, kind: str
) -> None:
    if kind == "datasets":
        assert post(http, part(rivers) + END).status_code == 201
    else:
        made = zipped(files.adapter(tmp_path / "captain"))
        assert http.post("/api/adapters", params={"name": "rivers"}, files={"file": made}).status_code == 201
    check = http.get(f"/api/names/{kind}/rivers").json()
    assert (check["available"], "already" in check["reason"]) == (False, True)
    with socket.create_connection(("127.0.0.1", settings.api_port), 10) as connection:
        head = (
            f"POST /api/{kind}?name=rivers HTTP/1.1\r\nHost: localhost\r\n"
            f"Authorization: {headers(settings)['Authorization']}\r\n"
            f"Content-Type: {HEADERS['Content-Type']}\r\nContent-Length: 1000000\r\n\r\n"
        )
        connection.sendall(head.encode())
        assert connection.recv(4096).startswith(b"HTTP/1.1 409")


def zipped(folder: Path) -> tuple[str, bytes]:
    import io
    import zipfile

    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        for member in folder.iterdir():
            archive.write(member, member.name)
    return f"{folder.name}.zip", data.getvalue()


def test_an_upload_that_breaks_off_leaves_nothing(settings: Settings, http: httpx.Client, rivers: bytes) -> None:
    with socket.create_connection(("127.0.0.1", settings.api_port), 10) as connection:
        head = (
            "POST /api/datasets?name=rivers HTTP/1.1\r\nHost: localhost\r\n"
            f"Authorization: {headers(settings)['Authorization']}\r\n"
            f"Content-Type: {HEADERS['Content-Type']}\r\nContent-Length: 1000000\r\n\r\n"
        )
        connection.sendall(head.encode() + part(rivers))
        until(lambda: any((settings.data_dir / "uploads").iterdir()), what="the upload to begin")
    until(lambda: leaves_nothing(settings), what="the upload to be cleared away")
    assert http.get("/api/datasets").json()["items"] == []


@pytest.mark.parametrize("filename", ["../../evil.jsonl", "..\\evil.jsonl", "/etc/passwd", "", "ümläut.jsonl"])
def test_a_files_name_is_never_a_path(http: httpx.Client, settings: Settings, rivers: bytes, filename: str) -> None:
    before = sorted(path.name for path in settings.data_dir.iterdir())
    assert post(http, part(rivers, filename=filename) + END).status_code == 201
    assert sorted(path.name for path in settings.data_dir.iterdir()) == before
    assert len(list((settings.data_dir / "datasets").iterdir())) == 1


@pytest.mark.parametrize("name", ["", "A", "a b", "../x", "-x", "x" * 64, "ä"])
def test_a_name_that_cannot_be_is_refused_before_the_body(http: httpx.Client, name: str) -> None:
    response = post(http, b"", name=name)
    assert (response.status_code, response.json()["error"]["param"]) == (422, "name")


def test_columns_can_be_mapped(http: httpx.Client) -> None:
    body = part(b"frage,antwort\nWohin?,Ans Meer.\nWoher?,Vom Berg.\n", filename="rivers.csv") + END
    assert post(http, body).status_code == 422
    mapped = post(http, body, columns='{"prompt": "frage", "completion": "antwort"}')
    assert mapped.status_code == 201, mapped.text
    rows = http.get("/api/datasets/rivers/rows").json()
    assert rows[0]["messages"][-1]["content"] == "Ans Meer."


@pytest.mark.parametrize("columns", ["{", "[]", '{"prompt": 1}', "null", "[" * 5000, r'{"prompt": "\ud800"}'])
def test_columns_that_are_no_mapping_are_refused(http: httpx.Client, columns: str) -> None:
    response = post(http, b"", columns=columns)
    assert (response.status_code, response.json()["error"]["param"]) == (422, "columns")
