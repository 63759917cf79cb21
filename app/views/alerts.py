"""Alerts: what fires now, what did, and the rules."""

from __future__ import annotations

from typing import get_args

import streamlit as st

from app.ui.data import client
from app.ui.identity import of_platform
from app.ui.page import attempt, confirm, elsewhere, heading, reading, show_faults, teach
from app.ui.paging import ROWS, leaf_through
from app.ui.stale import end_page
from app.ui.table import Cell, Column, Row, Tone, cell, table
from app.ui.text import number, plain
from core import alert_text
from core.api.schemas import Alert, AlertMetric, AlertRule, AlertRuleBody

_TONES: dict[str, Tone] = {"pending": "warn", "firing": "bad", "resolved": "good"}
_FIELDS = ("metric", "comparison", "threshold", "window_s", "for_s", "severity", "enabled")


def row(alert: Alert) -> Row:
    return Row(
        str(alert.id),
        (
            Cell(alert.state, tone=_TONES[alert.state]),
            cell(alert.rule, alert.severity),
            cell(alert.message),
            cell(alert.fired_at or alert.began_at),
            cell(alert.resolved_at),
        ),
    )


@st.fragment(run_every="2s")
def show_alerts() -> None:
    """Newest first, a page at a time."""
    with reading("the alerts"):
        found = leaf_through("alerts", lambda cursor: client().alerts(None, ROWS, cursor))
    if not found:
        teach(
            "No alert so far",
            "An alert is pending as soon as its rule's condition holds, fires when it has held long enough, and is "
            "resolved when it does not hold any more. The rules below are what is watched; webhooks (on the **Jobs** "
            "page) hear of `alert.firing` and `alert.resolved`.",
        )
        return
    columns = [
        Column("State", "badge"), Column("Rule"), Column("What"), Column("Since", "time"),
        Column("Resolved", "time", wide=True),
    ]  # fmt: skip
    table(columns, [row(alert) for alert in found], key="alerts", openable=False)


def rule_row(rule: AlertRule) -> Row:
    return Row(
        rule.name,
        (
            cell(rule.name),
            Cell("on" if rule.enabled else "off", tone="good" if rule.enabled else "idle"),
            cell(alert_text.condition(rule)),
            cell(f"{number(rule.window_s)} s"),
            cell(f"{number(rule.for_s)} s"),
            cell(rule.severity),
        ),
    )


def pick(rules: list[AlertRule]) -> None:
    """Fill the form with the chosen rule."""
    chosen = next((rule for rule in rules if rule.name == st.session_state["rule"]), None)
    if chosen is not None:
        st.session_state["rule_name"] = chosen.name
        for field in _FIELDS:
            st.session_state[f"rule_{field}"] = getattr(chosen, field)


def store() -> None:
    name = st.session_state["rule_name"]
    fields = {field: st.session_state[f"rule_{field}"] for field in _FIELDS}
    attempt(
        "Storing the rule", lambda: client().set_alert_rule(name, **fields), f"Rule {name} is stored.", place="rules"
    )


def drop(name: str) -> None:
    attempt("Deleting the rule", lambda: client().delete_alert_rule(name), f"Rule {name} is gone.", place="rules")


def said_of_form() -> str:
    """When the form's rule would alert."""
    rule = AlertRuleBody.model_construct(**{field: st.session_state[f"rule_{field}"] for field in _FIELDS})
    held = f" has held for {number(rule.for_s)} s" if rule.for_s else " holds"
    return f"this{held}: {alert_text.condition(rule)}"


def show_rules() -> None:
    """The rules, and a form that makes, changes or deletes one."""
    with reading("the rules"):
        rules = list(client().alert_rules())
    columns = [
        Column("Rule"), Column("On", "badge"), Column("Condition"), Column("Over the last", end=True, wide=True),
        Column("For at least", end=True, wide=True), Column("Severity", wide=True),
    ]  # fmt: skip
    table(columns, [rule_row(rule) for rule in rules], key="rules", openable=False)
    show_faults("rules")
    with st.expander("Make or change a rule", icon=":material/edit:"):
        st.selectbox(
            "Fill the form from", [rule.name for rule in rules], None, key="rule", on_change=pick, args=(rules,),
            placeholder="no rule: a new one",
        )  # fmt: skip
        defaults = AlertRuleBody(metric="attainment", comparison="below", threshold=0.99)
        left, middle, right = st.columns(3)
        left.text_input("Name", key="rule_name", max_chars=63)
        metrics = get_args(AlertMetric)
        metric = middle.selectbox("Figure", metrics, key="rule_metric", format_func=alert_text.figure)
        right.selectbox("Is", ("below", "above"), key="rule_comparison")
        unit = alert_text.unit(metric)
        left.number_input(
            "Threshold", value=defaults.threshold, format="%.4g", key="rule_threshold",
            help="A share, from 0 to 1" if unit == "%" else f"In {unit}" if unit else None,
        )  # fmt: skip
        middle.number_input("Over the last, s", 5.0, 600.0, defaults.window_s, key="rule_window_s")
        right.number_input("For at least, s", 0.0, 86_400.0, defaults.for_s, key="rule_for_s")
        left.selectbox("Severity", ("info", "warning", "critical"), 1, key="rule_severity")
        middle.toggle("On", True, key="rule_enabled")
        st.caption(plain(f"Alerts when {said_of_form()}."))
        name = st.session_state.get("rule_name")
        with st.container(horizontal=True):
            st.button("Store the rule", type="primary", key="store_rule", on_click=store, disabled=not name)
            if name in {rule.name for rule in rules}:
                confirm(
                    "Delete the rule",
                    f"Delete **{plain(name)}**? Nothing watches for it from then on; alerts of the past stay.",
                    "Delete it",
                    lambda: drop(name),
                    key="delete_rule",
                )


heading("Alerts", "What is wrong now and what was: rules on latency, queue and engine, looked at every five seconds.")
if not of_platform():
    st.info("Alerts are about the platform as a whole; those of its own tenant see them.", icon=":material/lock:")
    end_page()
show_alerts()
st.markdown("**Rules**")
show_rules()
elsewhere(
    "harli alerts\nharli alerts rules\nharli alerts set slow itl_p99_ms above 80 --for 120 --severity critical",
    "curl {api}/api/alerts\ncurl -X PUT {api}/api/alerts/rules/slow -H 'content-type: application/json' \\\n"
    '  -d \'{"metric": "itl_p99_ms", "comparison": "above", "threshold": 80}\'',
)
