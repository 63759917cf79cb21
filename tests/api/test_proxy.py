"""The API behind a reverse proxy: nginx, as it comes and as it is set up for long bodies."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from core.client import Client, calls
from core.client.steps import raise_for
from core.config import Settings
from core.errors import HarliError, Invalid, TooLarge
from core.intake import dataset
from tests.api.serving import headers, plain
from tests.api.test_events import listening
from tests.api.test_upload import END, HEADERS, head, leaves_nothing, part, post
from tests.client.openai import ChatServer
from tests.control import files
from tests.control.peer import EnginePeer
from tests.machine import nginx
from tests.stack import free_ports, until

pytestmark = pytest.mark.nginx
LARGE = "client_max_body_size 2m;"
# The body goes on as it comes; else nginx takes all of it first, and passes it on with its length.
AS_IT_COMES = f"{LARGE} proxy_request_buffering off; proxy_http_version 1.1;"
CONFIG = """
daemon off; master_process off; pid nginx.pid; error_log stderr warn;
events {{ worker_connections 64; }}
http {{
    access_log off;
    client_body_temp_path body; proxy_temp_path proxy; fastcgi_temp_path f; uwsgi_temp_path u; scgi_temp_path s;
    upstream api {{ {upstream} }}
    server {{
        listen 127.0.0.1:{port};
        location / {{ proxy_pass http://api; proxy_set_header Host 127.0.0.1; {more} }}
    }}
}}
"""


@contextlib.contextmanager
def before(settings: Settings, more: str = LARGE, upstream: str | None = None) -> Iterator[Settings]:
    """nginx in front of the served API, with `more` set; the settings of someone who reaches the API through it."""
    program = nginx()
    assert program is not None
    (port,) = free_ports(1)
    folder = Path(tempfile.mkdtemp(prefix="hngx"))
    upstream = upstream or f"server 127.0.0.1:{settings.api_port};"
    (folder / "nginx.conf").write_text(CONFIG.format(port=port, upstream=upstream, more=more))
    said = folder / "said"
    with said.open("wb") as output:
        process = subprocess.Popen([program, "-p", folder, "-e", "stderr", "-c", "nginx.conf"], stderr=output)
    try:

        def listens() -> bool:
            assert process.poll() is None, said.read_text()
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                return True
            return False

        until(listens, what="nginx")
        yield settings.model_copy(update={"api_port": port})
    finally:
        process.terminate()
        process.wait(60)
        shutil.rmtree(folder)


@pytest.fixture
def rivers(tmp_path: Path) -> bytes:
    """More than nginx keeps in memory, less than the API takes."""
    return files.jsonl(tmp_path / "rivers.jsonl", rows=6000).read_bytes()


def pieces(body: bytes) -> Iterator[bytes]:
    return (body[at : at + 10_000] for at in range(0, len(body), 10_000))


@pytest.mark.parametrize("more", [LARGE, AS_IT_COMES], ids=["whole", "as it comes"])
@pytest.mark.parametrize("chunked", [False, True], ids=["with its length", "in chunks"])
def test_a_file_comes_through_as_it_was_sent(settings: Settings, rivers: bytes, more: str, chunked: bool) -> None:
    body = part(rivers) + END
    with before(settings, more) as behind, plain(behind) as http:
        made = post(http, pieces(body) if chunked else body)
    assert made.status_code == 201, made.text
    assert made.json()["sha256"] == hashlib.sha256(rivers).hexdigest()
    assert made.json()["report"]["rows"] == 6000
    assert not any((settings.data_dir / "uploads").iterdir())


@pytest.mark.parametrize("proxied", [False, True])
def test_curl_which_asks_before_it_sends_is_told_to_go_on(
    settings: Settings, rivers: bytes, tmp_path: Path, proxied: bool
) -> None:
    with before(settings, AS_IT_COMES) if proxied else contextlib.nullcontext(settings) as behind:
        command = [
            "curl",
            "--silent",
            "--show-error",
            "--fail-with-body",
            "--noproxy",
            "*",
            "--expect100-timeout",
            "60",
        ]
        command += [
            "--header",
            f"Authorization: {headers(settings)['Authorization']}",
            "--header",
            "Expect: 100-continue",
        ]
        command += ["--form", f"file=@{tmp_path / 'rivers.jsonl'}", f"{behind.api_url}/api/datasets?name=rivers"]
        begun = time.monotonic()
        sent = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert sent.returncode == 0, sent.stderr + sent.stdout
    assert hashlib.sha256(rivers).hexdigest() in sent.stdout
    assert time.monotonic() - begun < 50, "it has not gone on by itself"


def test_who_asks_before_sending_is_refused_without_sending(settings: Settings, rivers: bytes) -> None:
    with plain(settings) as http:
        assert post(http, part(rivers) + END).status_code == 201
    with socket.create_connection(("127.0.0.1", settings.api_port), 10) as connection:
        connection.sendall(head(settings, 1_000_000, "Expect: 100-continue\r\n"))
        assert connection.recv(4096).startswith(b"HTTP/1.1 409")


def test_who_goes_on_sending_after_the_answer_still_reads_it(settings: Settings, rivers: bytes) -> None:
    with plain(settings) as http:
        assert post(http, part(rivers) + END).status_code == 201
    body = part(rivers) + END
    with socket.create_connection(("127.0.0.1", settings.api_port), 10) as connection:
        connection.sendall(head(settings, len(body)))
        for piece in pieces(body):
            connection.sendall(piece)
            time.sleep(0.01)
        said = connection.recv(65536)
    assert said.startswith(b"HTTP/1.1 409")
    assert b"name_taken" in said


def test_who_sends_without_end_is_not_waited_for(settings: Settings, rivers: bytes) -> None:
    with plain(settings) as http:
        assert post(http, part(rivers) + END).status_code == 201
    begun = time.monotonic()
    with socket.create_connection(("127.0.0.1", settings.api_port), 10) as connection, contextlib.suppress(OSError):
        connection.sendall(head(settings, 1_000_000))
        while True:
            connection.sendall(b"x")
            time.sleep(0.05)
    assert time.monotonic() - begun < 20


@pytest.mark.parametrize("more", [LARGE, AS_IT_COMES], ids=["whole", "as it comes"])
def test_a_refusal_comes_through_in_the_apis_words(settings: Settings, rivers: bytes, more: str) -> None:
    with before(settings, more) as behind, plain(behind) as http:
        assert post(http, part(rivers) + END).status_code == 201
        refused = post(http, part(rivers) + END)
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "name_taken")
        large = post(http, part(rivers + rivers) + END, name="twice")
        assert (large.status_code, large.json()["error"]["code"]) == (413, "upload_too_large")


def test_a_proxys_own_limit_is_told_from_ours(settings: Settings, rivers: bytes, tmp_path: Path) -> None:
    with (
        before(settings, "client_max_body_size 64k;") as behind,
        Client(behind.api_url, token=settings.token_file) as us,
    ):
        with pytest.raises(TooLarge, match="client_max_body_size"):
            us.upload_dataset(tmp_path / "rivers.jsonl")
        with pytest.raises(TooLarge, match="HARLI_MAX_UPLOAD_MIB"):
            (tmp_path / "twice.jsonl").write_bytes(rivers + rivers)
            us.upload_dataset(tmp_path / "twice.jsonl")


def test_an_upload_that_breaks_off_on_its_way_leaves_nothing(settings: Settings, rivers: bytes) -> None:
    body = part(rivers) + END
    with before(settings, AS_IT_COMES) as behind:
        with socket.create_connection(("127.0.0.1", behind.api_port), 10) as connection:
            head = (
                f"POST /api/datasets?name=rivers HTTP/1.1\r\nHost: localhost\r\n"
                f"Authorization: {headers(settings)['Authorization']}\r\n"
                f"Content-Type: {HEADERS['Content-Type']}\r\nContent-Length: {len(body)}\r\n\r\n"
            )
            connection.sendall(head.encode() + body[:-1000])
            until(lambda: any((settings.data_dir / "uploads").iterdir()), what="the upload to begin")
        until(lambda: leaves_nothing(settings), what="the upload to be cleared away")


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that the next checks take longer, each once; those that began have been taken out."""
    ingest, waits = dataset.ingest, list[float]()

    def slowly(*args: Any, progress: Callable[[int, int], None], **more: Any) -> Any:
        end = time.monotonic() + (waits.pop(0) if waits else 0)
        while time.monotonic() < end:
            time.sleep(0.02)
            progress(5, 10)
        return ingest(*args, progress=progress, **more)

    monkeypatch.setattr(dataset, "ingest", slowly)
    return waits


IMPATIENT = f"{LARGE} proxy_read_timeout 2s;"  # less would not do for an answer of a machine that is busy


def test_a_check_that_outlasts_the_proxys_patience_goes_on_for_our_client(
    settings: Settings, rivers: bytes, tmp_path: Path, slow: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    slow += [3.5, 3.5]
    monkeypatch.setattr(calls, "_PATIENCE_S", 0.3)
    with before(settings, IMPATIENT) as behind, Client(behind.api_url, token=settings.token_file) as us:
        made = us.upload_dataset(tmp_path / "rivers.jsonl")
        assert (made.name, made.report.rows) == ("rivers", 6000)
        assert us.datasets().items == [made]
        (operation,) = us.operations()
        assert (operation.state, operation.result) == ("succeeded", made.id)
        # What is wrong with a file comes the same way.
        (tmp_path / "bad.jsonl").write_bytes(rivers[:1000] + b"\n{broken\n")
        with pytest.raises(Invalid) as caught:
            us.upload_dataset(tmp_path / "bad.jsonl")
    assert caught.value.report.findings[0].code == "broken_json"
    assert (caught.value.code, us.base_url in caught.value.message) == ("broken_json", False)
    assert not any((settings.data_dir / "uploads").iterdir())


def test_who_waits_for_it_longer_than_the_proxy_is_told_so_and_nothing_is_left(
    settings: Settings, rivers: bytes, slow: list[float]
) -> None:
    slow.append(60)
    with before(settings, IMPATIENT) as behind, plain(behind) as http:
        response = post(http, part(rivers) + END)
    with pytest.raises(HarliError, match="proxy_read_timeout") as caught:
        raise_for(response)
    assert caught.value.status == 504
    until(lambda: leaves_nothing(settings), 30, "the check to end, which by itself would take longer")


def test_a_proxy_that_sends_it_again_makes_one_data_set(settings: Settings, rivers: bytes, slow: list[float]) -> None:
    slow.append(60)
    more = f"{IMPATIENT} proxy_next_upstream error timeout non_idempotent;"
    upstream = f"server 127.0.0.1:{settings.api_port} max_fails=0;" * 2
    with before(settings, more, upstream) as behind, plain(behind) as http:
        made = post(http, part(rivers) + END)
        assert made.status_code == 201, made.text
        assert slow == [], "the first one had begun"
        (stored,) = http.get("/api/datasets").json()["items"]
    assert stored["id"] == made.json()["id"]
    until(lambda: not any((settings.data_dir / "uploads").iterdir()), 30, "the first one's check to end")
    assert len(list((settings.data_dir / "datasets").iterdir())) == 1


def test_an_api_that_comes_back_meanwhile_gets_it(settings: Settings, rivers: bytes) -> None:
    (nobody,) = free_ports(1)
    upstream = f"server 127.0.0.1:{nobody} max_fails=0; server 127.0.0.1:{settings.api_port} backup;"
    with before(settings, LARGE, upstream) as behind, plain(behind) as http:
        assert post(http, part(rivers) + END).status_code == 201


def test_streams_are_not_kept_back(settings: Settings) -> None:
    chat_server = ChatServer()
    chat_server.pause_s = 0.5
    peer = EnginePeer(settings.resolved_link_url, http_url=chat_server.url)
    try:
        with before(settings) as behind, plain(behind) as http, Client(behind.api_url, token=settings.token_file) as us:
            with listening(http) as heard:
                peer.hello()
                until(lambda: any(event.topic == "engine" for _, event in heard), what="the engine's event")
            until(lambda: us.engine().state == "ready", what="the engine")
            came = [time.monotonic() for _ in us.chat("Where does the river go?")]
            assert came[-1] - came[0] > chat_server.pause_s / 2, "the first piece was there before the last was sent"
    finally:
        peer.close()
        chat_server.close()
