"""`harli token`, `harli tenants`, `harli users` and `harli audit`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from core.cli_shared import AsJson, connected
from core.errors import NotFound

if TYPE_CHECKING:
    from core.api import tenant_schemas as schemas
    from core.client import Client

token = typer.Typer(no_args_is_help=True, help="API tokens: what programs and people show the API.")
tenants = typer.Typer(invoke_without_command=True, help="Those who share the platform; without a command, list them.")
users = typer.Typer(invoke_without_command=True, help="The users of a tenant; without a command, list them.")

Tenant = Annotated[str | None, typer.Option(help="Its tenant; else your own.")]
OfTenant = Annotated[str | None, typer.Option("--tenant", help="Only of this tenant.")]
UserName = Annotated[str, typer.Argument(metavar="USER", help="The user's name or id.")]


def mount(app: typer.Typer) -> None:
    """Add the commands."""
    for name, group in (("token", token), ("tenants", tenants), ("users", users)):
        app.add_typer(group, name=name)
    app.command()(audit)
    app.command()(whoami)


def _print(value: Any, facts: Sequence[str], json: bool) -> None:
    from core import printing

    if json:
        printing.as_json(value)
    else:
        printing.facts([(name.replace("_", " "), getattr(value, name)) for name in facts])


def _table(items: Sequence[Any], columns: dict[str, str], empty: str, json: bool) -> None:
    from core import printing

    shown = [(title, partial(_shown, name)) for title, name in columns.items()]
    printing.listing(items, shown, empty, json)


def _shown(name: str, row: Any) -> object:
    value = getattr(row, name)
    return (", ".join(value) or "reads only") if isinstance(value, list) else value


def _user(client: Client, named: str, tenant: str | None) -> schemas.User:
    """By id, or by name within a tenant (None: the own one)."""
    tenant = tenant or client.me().tenant
    for user in client.users():
        if user.id == named or (user.name == named and user.tenant == tenant):
            return user
    raise NotFound("user_not_found", f"tenant {tenant} has no user {named}; `harli users` lists them", "user")


# ---- who one is ------------------------------------------------------------------------------------------------------


def whoami(json: AsJson = False) -> None:
    """Say whom the token stands for, and what it may change."""
    with connected() as client:
        me = client.me()
    _print(me, ("user", "tenant", "role", "scopes", "token_id"), json)


# ---- tokens ----------------------------------------------------------------------------------------------------------

_TOKENS = {
    "ID": "id", "NAME": "name", "TENANT": "tenant", "USER": "user", "BEGINS": "hint", "MAY CHANGE": "scopes",
    "CREATED": "created_at", "EXPIRES": "expires_at", "REVOKED": "revoked_at", "LAST USED": "last_used_at",
}  # fmt: skip


@token.command("create")
def token_create(
    name: Annotated[str, typer.Argument(help="What it is for.")],
    user: Annotated[str | None, typer.Option(help="For whom, by name or id; else for yourself.")] = None,
    tenant: Tenant = None,
    scope: Annotated[list[str] | None, typer.Option(help="An area that it may change; all unless given.")] = None,
    read_only: Annotated[bool, typer.Option("--read-only", help="It changes nothing.")] = False,
    days: Annotated[float | None, typer.Option(help="Days until it expires; else never.")] = None,
    json: AsJson = False,
) -> None:
    """Make a token and print it, once."""
    from core import printing
    from core.api.tenant_schemas import Scope

    known = get_args(Scope)
    if wrong := [one for one in scope or [] if one not in known]:
        raise typer.BadParameter(f"{wrong[0]!r} is none of {', '.join(known)}", param_hint="--scope")
    with connected() as client:
        owner = _user(client, user, tenant).id if user is not None else None
        scopes = [] if read_only else scope
        made = client.create_token(name, owner, scopes=scopes, expires_in_days=days)
    if json:
        printing.as_json(made)
    else:
        print(made.token)
        printing.err.print(f"Token {made.id} of {made.user} ({made.tenant}); keep it, it is not shown again.")


@token.command("list")
def token_list(tenant: OfTenant = None, json: AsJson = False) -> None:
    """List tokens, newest first, the revoked ones too."""
    with connected() as client:
        _table(client.tokens(tenant), _TOKENS, "No tokens.", json)


@token.command("revoke")
def token_revoke(
    token_id: Annotated[str, typer.Argument(metavar="TOKEN_ID", help="As `harli token list` shows it.")],
    json: AsJson = False,
) -> None:
    """Have a token refused from now on."""
    with connected() as client:
        _print(client.revoke_token(token_id), ("id", "name", "user", "revoked_at"), json)


# ---- tenants ---------------------------------------------------------------------------------------------------------


@tenants.callback()
def tenants_group(ctx: typer.Context, json: AsJson = False) -> None:
    if ctx.invoked_subcommand is None:
        tenants_list(json=json)


@tenants.command("list")
def tenants_list(json: AsJson = False) -> None:
    """List tenants by name."""
    with connected() as client:
        _table(
            client.tenants(), {"NAME": "name", "SUSPENDED": "suspended", "CREATED": "created_at"}, "No tenants.", json
        )


@tenants.command("create")
def tenants_create(name: Annotated[str, typer.Argument()], json: AsJson = False) -> None:
    """Make a tenant; then give it users (`harli users create`)."""
    with connected() as client:
        _print(client.create_tenant(name), ("name", "created_at"), json)


@tenants.command("suspend")
def tenants_suspend(name: Annotated[str, typer.Argument()], json: AsJson = False) -> None:
    """Have a tenant's tokens refused; what it has stays."""
    with connected() as client:
        _print(client.suspend_tenant(name), ("name", "suspended"), json)


@tenants.command("restore")
def tenants_restore(name: Annotated[str, typer.Argument()], json: AsJson = False) -> None:
    """Take a suspended tenant's tokens again."""
    with connected() as client:
        _print(client.suspend_tenant(name, False), ("name", "suspended"), json)


# ---- users -----------------------------------------------------------------------------------------------------------

_USER = ("id", "tenant", "name", "role", "disabled")


@users.callback()
def users_group(ctx: typer.Context, json: AsJson = False) -> None:
    if ctx.invoked_subcommand is None:
        users_list(json=json)


@users.command("list")
def users_list(tenant: OfTenant = None, json: AsJson = False) -> None:
    """List users by tenant and name."""
    columns = {
        "NAME": "name", "TENANT": "tenant", "ROLE": "role", "DISABLED": "disabled", "CREATED": "created_at", "ID": "id"
    }  # fmt: skip
    with connected() as client:
        _table(client.users(tenant), columns, "No users.", json)


def _role(text: str) -> Any:
    from core.api.tenant_schemas import Role

    if text not in get_args(Role):
        raise typer.BadParameter(f"{text!r} is none of {', '.join(get_args(Role))}")
    return text


@users.command("create")
def users_create(
    name: Annotated[str, typer.Argument(metavar="USER")],
    role: Annotated[str, typer.Option(help="viewer, operator or admin.")] = "operator",
    tenant: Tenant = None,
    json: AsJson = False,
) -> None:
    """Make a user; then make a token for it (`harli token create NAME --user USER`)."""
    wanted = _role(role)
    with connected() as client:
        _print(client.create_user(name, wanted, tenant), _USER, json)


@users.command("set-role")
def users_set_role(
    user: UserName,
    role: Annotated[str, typer.Argument(help="viewer, operator or admin.")],
    tenant: Tenant = None,
    json: AsJson = False,
) -> None:
    """Change what a user may do; in force for the user's tokens at once."""
    wanted = _role(role)
    with connected() as client:
        _print(client.update_user(_user(client, user, tenant).id, role=wanted), _USER, json)


@users.command("disable")
def users_disable(user: UserName, tenant: Tenant = None, json: AsJson = False) -> None:
    """Have all of a user's tokens refused."""
    with connected() as client:
        _print(client.update_user(_user(client, user, tenant).id, disabled=True), _USER, json)


@users.command("enable")
def users_enable(user: UserName, tenant: Tenant = None, json: AsJson = False) -> None:
    """Take a disabled user's tokens again."""
    with connected() as client:
        _print(client.update_user(_user(client, user, tenant).id, disabled=False), _USER, json)


# ---- the audit log ---------------------------------------------------------------------------------------------------


def audit(
    user: Annotated[str | None, typer.Option(help="Only what this user did.")] = None,
    tenant: OfTenant = None,
    outcome: Annotated[str | None, typer.Option(help="done, refused or failed.")] = None,
    text: Annotated[str | None, typer.Option(help="Looked for in action and object.")] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, max=500, help="How many, newest first.")] = 50,
    json: AsJson = False,
) -> None:
    """Show who changed what, newest first."""
    columns = {
        "TIME": "time", "USER": "user", "TENANT": "tenant", "FROM": "address", "ACTION": "action", "OBJECT": "ref",
        "OUTCOME": "outcome", "CODE": "code",
    }  # fmt: skip
    with connected() as client:
        page = client.audit(limit, user=user, tenant=tenant, outcome=outcome, text=text)
    _table(page.items, columns, "Nothing has been changed.", json)
