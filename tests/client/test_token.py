"""Which token a client shows, and to whom."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from core.client.token import Bearer

API = "http://127.0.0.1:8600"


def shown(auth: Bearer, url: str = f"{API}/api/jobs") -> str | None:
    request = next(auth.auth_flow(httpx.Request("GET", url)))
    return request.headers.get("authorization")


@pytest.fixture
def here(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The local admin's token file of the settings."""
    monkeypatch.setenv("HARLI_DATA_DIR", str(data_dir))
    monkeypatch.delenv("HARLI_TOKEN", raising=False)
    file = data_dir / "admin-token"
    file.write_text("harli_local\n")
    return file


def test_a_token_that_is_given_is_shown_to_its_api_and_to_no_other_address() -> None:
    auth = Bearer(API, "harli_x")
    assert shown(auth) == "Bearer harli_x"
    assert shown(auth, "http://127.0.0.1:8601/v1/chat/completions") is None
    assert shown(auth, "https://127.0.0.1:8600/api/jobs") is None


def test_a_file_is_read_when_it_is_there(tmp_path: Path) -> None:
    auth = Bearer(API, tmp_path / "token")
    assert shown(auth) is None
    (tmp_path / "token").write_text("harli_late\n")
    assert shown(auth) == "Bearer harli_late"


@pytest.mark.parametrize("url", [API, "http://localhost:8600"])
def test_on_its_own_machine_the_local_admins_is_found(here: Path, url: str) -> None:
    assert shown(Bearer(url, None), f"{url}/api/jobs") == "Bearer harli_local"


@pytest.mark.parametrize("url", ["http://127.0.0.1:9999", "http://harli.example:8600", "https://127.0.0.1:8600"])
def test_the_local_admins_is_shown_to_no_other_api(here: Path, url: str) -> None:
    assert shown(Bearer(url, None), f"{url}/api/jobs") is None


def test_a_token_in_the_settings_goes_before_the_file(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HARLI_TOKEN", "harli_mine")
    assert shown(Bearer("http://harli.example:8600", None), "http://harli.example:8600/api/me") == "Bearer harli_mine"


def test_an_empty_one_shows_none_at_all(here: Path) -> None:
    assert shown(Bearer(API, "")) is None
