"""`harli token`, `tenants`, `users` and `audit`: on the API's own machine nobody types a token, elsewhere one does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from core.cli import app
from core.config import Settings
from tests.api.serving import served


def commands(settings: Settings, **env: str) -> Callable[..., Result]:
    def harli(*arguments: str) -> Result:
        variables = {
            "HARLI_API_PORT": str(settings.api_port), "HARLI_DATA_DIR": str(settings.data_dir), "COLUMNS": "200", **env,
        }  # fmt: skip
        return CliRunner().invoke(app, arguments, env=variables)

    return harli


def answer(result: Result) -> Any:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_a_tenant_gets_a_user_a_token_and_loses_it_again(data_dir: Path, tmp_path: Path) -> None:
    with served(data_dir) as settings:
        harli = commands(settings)
        assert answer(harli("whoami", "--json"))["platform_admin"]
        assert answer(harli("tenants", "create", "acme", "--json"))["name"] == "acme"
        user = answer(harli("users", "create", "ann", "--tenant", "acme", "--role", "admin", "--json"))
        made = harli("token", "create", "laptop", "--user", "ann", "--tenant", "acme", "--scope", "jobs", "--days", "7")
        token = made.stdout.strip()
        assert token.startswith("harli_")
        assert "not shown again" in made.stderr

        ann = commands(settings, HARLI_TOKEN=token, HARLI_DATA_DIR=str(tmp_path))
        me = answer(ann("whoami", "--json"))
        assert (me["user"], me["tenant"], me["scopes"]) == ("ann", "acme", ["jobs"])
        assert [one["name"] for one in answer(ann("tenants", "list", "--json"))] == ["acme"]
        refused = ann("users", "create", "eve")
        assert (refused.exit_code, "[scope]" in refused.stderr) == (1, True)
        assert "harli_" not in ann("token", "list").stdout.replace(token[:12], "")

        assert answer(harli("users", "set-role", "ann", "viewer", "--tenant", "acme", "--json"))["role"] == "viewer"
        assert "[role]" in ann("tenants").stderr
        assert answer(harli("users", "disable", user["id"], "--json"))["disabled"]
        assert "[user_disabled]" in ann("whoami").stderr
        answer(harli("users", "enable", user["id"], "--json"))
        held = next(one for one in answer(harli("token", "list", "--json")) if one["name"] == "laptop")
        assert answer(harli("token", "revoke", held["id"], "--json"))["revoked_at"]
        assert "[token_revoked]" in ann("whoami").stderr

        lines = answer(harli("audit", "--text", "users", "--json"))
        assert [line["outcome"] for line in lines][-2:] == ["refused", "done"]
        assert "PATCH /api/users/{user_id}" in harli("audit").stdout


def test_without_a_token_it_says_where_one_lies(data_dir: Path, tmp_path: Path) -> None:
    with served(data_dir) as settings:
        elsewhere = commands(settings, HARLI_DATA_DIR=str(tmp_path))("jobs")
    assert elsewhere.exit_code == 1
    assert "admin-token" in elsewhere.stderr
    assert "[token_missing]" in elsewhere.stderr


def test_what_is_no_role_or_scope_is_refused_before_anything_is_sent(tmp_path: Path) -> None:
    harli = commands(Settings(data_dir=tmp_path, api_port=1))
    for arguments in (("users", "create", "x", "--role", "king"), ("token", "create", "x", "--scope", "all")):
        result = harli(*arguments)
        assert result.exit_code == 2, result.output
        assert "is none of" in result.stderr
