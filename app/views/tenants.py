"""Tenants: who shares the platform, their users, and the API tokens that these show."""

from __future__ import annotations

from typing import Any, get_args

import streamlit as st

from app.ui import quota
from app.ui.data import client
from app.ui.identity import me
from app.ui.page import attempt, confirm, elsewhere, heading, reading, show_faults
from app.ui.table import Cell, Column, Row, cell, table
from app.ui.text import day, plain
from core.api.tenant_schemas import Role, Scope, Tenant, Token, User

_CLI = (
    "harli tenants create acme\nharli users create ann --tenant acme --role admin\n"
    "harli token create ann-laptop --user ann --tenant acme --days 90"
)
_HTTP = (
    "curl {api}/api/tokens -H 'content-type: application/json' \\\n"
    '  -d \'{"name": "ci", "scopes": ["jobs", "datasets"], "expires_in_days": 90}\''
)
_ROLES = "A **viewer** looks, an **operator** changes data sets, jobs and adapters, an **admin** also these lists."


# ---- tokens ----------------------------------------------------------------------------------------------------------


def token_row(token: Token) -> Row:
    if token.revoked_at is not None:
        state = Cell("revoked", tone="bad")
    elif token.expires_at is not None:
        state = Cell("valid", f"until {day(token.expires_at)}", "good")
    else:
        state = Cell("valid", tone="good")
    return Row(
        token.id,
        (
            cell(token.name, f"{token.hint}…"),
            state,
            cell(token.user, token.tenant),
            cell(", ".join(token.scopes) or "reads only"),
            cell(token.last_used_at, "" if token.last_used_at else "never"),
            cell(token.created_at),
        ),
    )


def make_token() -> None:
    """Make the token of the form; it is shown until another one is made or the page is left."""
    state = st.session_state
    days = state["token_days"]

    def make() -> None:
        scopes = None if state["token_all"] else list(state["token_scopes"])
        made = client().create_token(
            state["token_name"].strip(), state["token_user"], scopes=scopes, expires_in_days=days
        )
        state["_made_token"] = made.token

    state.pop("_made_token", None)
    attempt("Creating the token", make, "Token created", place="token")


def show_new_token(users: list[User]) -> None:
    named = {user.id: f"{user.name} · {user.tenant}" for user in users if not user.disabled}
    mine = me()
    ids = sorted(named, key=lambda key: named[key] != f"{mine.user} · {mine.tenant}")
    with st.form("new_token"):
        st.markdown("**New token**")
        st.text_input("What it is for", key="token_name", max_chars=120, placeholder="ci")
        st.selectbox("User", ids, format_func=lambda key: named[key], key="token_user")
        st.checkbox("It may change all that its user may", value=True, key="token_all")
        st.multiselect("Otherwise these areas (none: it only reads)", get_args(Scope), key="token_scopes")
        st.number_input("Days until it expires", 1, 3650, 90, key="token_days")
        st.form_submit_button("Create token", type="primary", on_click=make_token)
    made = st.session_state.get("_made_token")
    if made:
        st.success("Copy it now: it is not kept and cannot be shown again.", icon=":material/key:")
        st.code(made, language=None, wrap_lines=True)
    show_faults("token")


def revoke(token: Token) -> None:
    attempt(f"Revoking {token.name}", lambda: client().revoke_token(token.id), f"Token {token.name} revoked")


def show_tokens() -> None:
    with reading("the tokens"):
        tokens, users = client().tokens(), client().users()
    left, right = st.columns([2, 1], gap="large")
    with right:
        show_new_token(list(users))
    with left:
        columns = [
            Column("Token"), Column("State", "badge"), Column("User"), Column("May change", wide=True),
            Column("Last used", "time"), Column("Created", "time", wide=True),
        ]  # fmt: skip
        chosen = _chosen("tokens", columns, [token_row(token) for token in tokens], "Press a token to revoke it.")
        token = next((token for token in tokens if token.id == chosen), None)
        if token is not None and token.revoked_at is None:
            confirm(
                "Revoke",
                f"Revoke **{plain(token.name)}** of {plain(token.user)}? Whatever uses it is refused at once.",
                "Revoke it",
                lambda: revoke(token),
                key="revoke",
            )


# ---- users -----------------------------------------------------------------------------------------------------------


def user_row(user: User) -> Row:
    state = Cell("disabled", tone="bad") if user.disabled else Cell("enabled", tone="good")
    return Row(user.id, (cell(user.name), state, cell(user.role), cell(user.tenant), cell(user.created_at)))


def make_user() -> None:
    state = st.session_state
    name = state["user_name"].strip()
    attempt(
        f"Creating user {name}",
        lambda: client().create_user(name, state["user_role"], state["user_tenant"]),
        f"User {name} created; create a token for it under Tokens",
        place="user",
    )


def change_user(user: User, **change: Any) -> None:
    attempt(f"Changing {user.name}", lambda: client().update_user(user.id, **change), f"{user.name} changed")


def show_user(user: User) -> None:
    """What can be done with a user."""
    with st.container(horizontal=True, vertical_alignment="bottom"):
        role = st.selectbox(
            f"Role of {user.name}", get_args(Role), get_args(Role).index(user.role), key=f"role_{user.id}", width=180
        )
        st.button("Set role", key="set_role", disabled=role == user.role, on_click=lambda: change_user(user, role=role))
        if user.disabled:
            st.button("Enable", key="enable", on_click=lambda: change_user(user, disabled=False))
        else:
            confirm(
                "Disable",
                f"Disable **{plain(user.name)}**? All of the user's tokens are refused until the user is enabled.",
                "Disable the user",
                lambda: change_user(user, disabled=True),
                key="disable",
            )


def show_users() -> None:
    with reading("the users"):
        users, tenants = client().users(), client().tenants()
    left, right = st.columns([2, 1], gap="large")
    with right, st.form("new_user"):
        st.markdown("**New user**")
        st.text_input("Name", key="user_name", max_chars=63, placeholder="ann@example.com")
        st.selectbox("Role", get_args(Role), 1, key="user_role")
        names = sorted((tenant.name for tenant in tenants), key=lambda name: name != me().tenant)
        st.selectbox("Tenant", names, key="user_tenant")
        st.form_submit_button("Create user", type="primary", on_click=make_user)
        st.caption(_ROLES)
    with right:
        show_faults("user")
    with left:
        columns = [
            Column("User"), Column("State", "badge"), Column("Role"), Column("Tenant"),
            Column("Created", "time", wide=True),
        ]  # fmt: skip
        press = "Press a user to change the role, or to disable the user."
        chosen = _chosen("users", columns, [user_row(user) for user in users], press)
        user = next((user for user in users if user.id == chosen), None)
        if user is not None:
            show_user(user)


# ---- tenants ---------------------------------------------------------------------------------------------------------


def tenant_row(tenant: Tenant) -> Row:
    state = Cell("suspended", tone="bad") if tenant.suspended else Cell("active", tone="good")
    return Row(tenant.name, (cell(tenant.name), state, cell(tenant.created_at)))


def make_tenant() -> None:
    name = st.session_state["tenant_name"].strip()
    attempt(
        f"Creating tenant {name}",
        lambda: client().create_tenant(name),
        f"Tenant {name} created; give it users under Users",
        place="tenant",
    )


def suspend(tenant: Tenant, suspended: bool) -> None:
    done = f"{tenant.name} is {'suspended' if suspended else 'active again'}"
    attempt(f"Changing {tenant.name}", lambda: client().suspend_tenant(tenant.name, suspended), done)


def show_tenants() -> None:
    with reading("the tenants"):
        tenants, mine = client().tenants(), me()
    left, right = st.columns([2, 1], gap="large")
    with right:
        if mine.platform_admin:
            with st.form("new_tenant"):
                st.markdown("**New tenant**")
                st.text_input("Name", key="tenant_name", max_chars=63, placeholder="acme")
                st.form_submit_button("Create tenant", type="primary", on_click=make_tenant)
                st.caption("What a tenant has, others neither see nor find; adapters' names are unique among all.")
        show_faults("tenant")
    with left:
        columns = [Column("Tenant"), Column("State", "badge"), Column("Created", "time")]
        press = "Press a tenant to see its quota, or to suspend it."
        chosen = _chosen("tenants", columns, [tenant_row(tenant) for tenant in tenants], press)
        tenant = next((tenant for tenant in tenants if tenant.name == chosen), None)
        if tenant is None:
            return
        quota.draw(tenant.name, editable=mine.platform_admin)
        if not mine.platform_admin:
            return
        if tenant.suspended:
            st.button("End the suspension", key="restore", on_click=lambda: suspend(tenant, False))
        elif tenant.name != mine.tenant:
            confirm(
                "Suspend",
                f"Suspend **{plain(tenant.name)}**? All of its tokens are refused; what it has stays.",
                "Suspend it",
                lambda: suspend(tenant, True),
                key="suspend",
            )


# ---- the page --------------------------------------------------------------------------------------------------------


def _chosen(name: str, columns: list[Column], rows: list[Row], press: str) -> str | None:
    """Draw a table; the id of the row that was pressed last. `press` says what pressing one is for."""
    key = f"_chosen_{name}"
    st.session_state[key] = table(columns, rows, key=name, selected=st.session_state.get(key)) or st.session_state.get(
        key
    )
    chosen: str | None = st.session_state[key]
    if chosen is None:
        st.caption(press)
    return chosen


heading("Tenants", "Who shares the platform, what each may do, and the tokens that programs and people show.")
view = st.segmented_control(
    "View", ["Tokens", "Users", "Tenants"], default="Tokens", required=True, key="tenancy", bind="query-params",
    label_visibility="collapsed",
)  # fmt: skip
{"Tokens": show_tokens, "Users": show_users, "Tenants": show_tenants}[view]()
elsewhere(_CLI, _HTTP)
