"""Who reaches the console from another machine is asked for a token first."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import streamlit as st
from streamlit import config
from streamlit.testing.v1 import AppTest

from tests.machine import ROOT
from tests.stack import free_ports


@pytest.fixture
def reached_from_elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    (port,) = free_ports(1)
    monkeypatch.setenv("HARLI_API_PORT", str(port))
    monkeypatch.setenv("HARLI_DATA_DIR", str(tmp_path))
    (tmp_path / "admin-token").write_text("harli_local")
    st.cache_resource.clear()
    st.cache_data.clear()
    config.set_option("server.address", "0.0.0.0")
    yield
    config.set_option("server.address", "127.0.0.1")
    st.cache_resource.clear()


@pytest.mark.usefixtures("reached_from_elsewhere")
def test_nothing_is_shown_before_a_token_is_taken() -> None:
    app = AppTest.from_file(str(ROOT / "app" / "main.py"), default_timeout=30).run()
    assert not app.exception
    assert [title.value for title in app.title] == ["Sign in"]
    app.text_input[0].input("harli_guess")
    app.button[0].click().run()
    assert [title.value for title in app.title] == ["Sign in"]
    assert app.error, "it says why the token was not taken"
