"""Targets, Alerts and Engine without a browser: what their pages hold and what their buttons do, in front of a served
API with a peer in the engine's place."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import streamlit as st
from streamlit import config as st_config
from streamlit.testing.v1 import AppTest

from core.client import Client
from core.link.messages import EngineNotice, Learnt
from tests.api.serving import served
from tests.app.peer import Peer
from tests.machine import ROOT
from tests.stack import until

LEARNT = {
    "steps": [(3, 20.0, 24.0)],
    "tasklets": {"forward": (5.0, 6.0), "head": (9.0, 10.0), "backward": (8.0, 9.0), "optimizer": (4.0, 5.0)},
    "mix": {"forward": 4.0, "head": 1.0, "backward": 4.0, "optimizer": 1.0},
    "step_tokens": 256.0,
}


@dataclass(frozen=True)
class Front:
    client: Client
    peer: Peer


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory, bundled_model: Path) -> Iterator[Front]:
    patch = pytest.MonkeyPatch()
    with served(tmp_path_factory.mktemp("operating"), engine={"model": str(bundled_model)}) as settings:
        patch.setenv("HARLI_API_PORT", str(settings.api_port))
        patch.setenv("HARLI_DATA_DIR", str(settings.data_dir))
        st.cache_resource.clear()
        st.cache_data.clear()
        # What `app/.streamlit/config.toml` says to a console that is started.
        address = st_config.get_option("server.address")
        st_config.set_option("server.address", "127.0.0.1")
        peer = Peer(settings.resolved_link_url, bundled_model, "http://127.0.0.1:1")
        with Client(settings.api_url) as client, peer:
            until(lambda: client.live().window is not None, 60, "the first figures")
            peer.say(Learnt(engine_id=peer.engine_id, time=0.0, **LEARNT))  # type: ignore[arg-type]
            yield Front(client, peer)
        st_config.set_option("server.address", address)
        patch.undo()


@pytest.fixture
def client(front: Front) -> Client:
    return front.client


def view(name: str) -> AppTest:
    app = AppTest.from_file(str(ROOT / "app" / "main.py"), default_timeout=60).run()
    app.switch_page(f"views/{name}.py").run()
    assert not app.exception, app.exception[0].message
    assert not app.error, app.error[0].value
    return app


def shown(app: AppTest) -> str:
    return "\n".join([*(one.value for one in app.markdown), *(one.value for one in app.caption)])


def test_the_targets_page_reads_the_frontier_off_what_the_engine_has_learnt(client: Client) -> None:
    found = until(lambda: (now := client.frontier()).source == "learnt" and now, 150, "the frontier")
    assert found.points[0].finetune_tokens_s < found.points[-1].finetune_tokens_s
    assert found.now is not None and found.now.target_ms == 60.0

    app = view("targets")
    until(lambda: app.run().slider, 150, "the slider", pause_s=0.5)
    assert "Finetune throughput against the target" in shown(app)
    app.slider[0].set_value(found.points[-1].target_ms).run()
    app.button(key="take_target").click().run()
    assert app.number_input(key="itl_ms").value == round(found.points[-1].target_ms, 1)


def test_a_target_of_a_tenant_by_the_week_is_added_and_removed(client: Client) -> None:
    app = view("targets")
    app.number_input(key="new_target_ms").set_value(150.0)
    app.toggle(key="new_target_weekly").set_value(True).run()
    app.button(key="add_target_now").click().run()
    (added,) = [target for target in client.targets().targets if target.windows]
    assert (added.kind, added.ms, added.windows[0].start) == ("itl", 150.0, "09:00")
    app.button(key="remove_target_0").click().run()
    assert [target for target in client.targets().targets if target.windows] == []


def test_the_alerts_page_makes_and_deletes_a_rule(client: Client) -> None:
    app = view("alerts")
    app.selectbox(key="rule").set_value("attainment").run()
    assert app.text_input(key="rule_name").value == "attainment"
    app.text_input(key="rule_name").set_value("tight").run()
    app.number_input(key="rule_threshold").set_value(0.999).run()
    assert "below 99\\.9 %" in shown(app), "the form says when its rule alerts"
    app.button(key="store_rule").click().run()
    rules = {rule.name: rule for rule in client.alert_rules()}
    assert (rules["tight"].metric, rules["tight"].threshold) == ("attainment", 0.999)
    assert app.button(key="delete_rule").label == "Delete it", "the answer to a question, not the first button"
    app.button(key="delete_rule").click().run()
    assert "tight" not in {rule.name for rule in client.alert_rules()}


def test_the_engine_page_shows_state_and_examines_on_demand(client: Client) -> None:
    app = view("engine")
    assert "engine ready" in shown(app)
    assert "Settings in force" in shown(app)
    assert app.button(key="examine").label == "Examine this machine"


def test_the_guards_reason_stands_on_the_overview_until_it_lets_go(front: Front) -> None:
    def tell(code: str, text: str) -> None:
        notice = EngineNotice(
            engine_id=front.peer.engine_id, time=time.time(), level="warning", code=code, message=text
        )
        front.peer.say(notice)
        until(lambda: code in [notice.code for notice in front.client.live().engine.notices], 60, code)
        st.cache_data.clear()

    tell("guard", "finetuning paused: gaps over 60 ms")
    (warning,) = view("overview").warning
    assert "The guard acts" in warning.value
    assert "gaps over 60 ms" in warning.value
    tell("guard_lifted", "finetuning goes on")
    assert list(view("overview").warning) == []


def test_another_tenants_viewer_is_told_whose_the_alerts_are(front: Front) -> None:
    front.client.create_tenant("acme")
    user = front.client.create_user("ann", "viewer", tenant="acme")
    token = front.client.create_token("hers", user=user.id).token
    app = AppTest.from_file(str(ROOT / "app" / "main.py"), default_timeout=60)
    app.session_state["_token"] = token
    app.run().switch_page("views/alerts.py").run()
    assert "those of its own tenant see them" in app.info[0].value
    app.switch_page("views/engine.py").run()
    assert not app.error and not app.exception
    assert "Of the API" not in [tab.label for tab in app.tabs]
