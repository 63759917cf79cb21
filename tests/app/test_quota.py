"""A tenant's quota in words."""

from __future__ import annotations

from app.ui import quota
from core.api.job_schemas import Quota


def test_what_is_used_stands_beside_its_limit() -> None:
    found = Quota(tenant="acme", finetune_tokens_day=5000, tokens_today=1200, running_now=1, waiting_now=0)
    assert quota.used(found, "finetune_tokens_day") == "1,200 of 5,000"
    assert quota.used(found, "running_jobs") == "1, no limit"
