"""The calls around jobs: estimates, the queue, samples, comparisons, schedules, webhooks, quotas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from core.api import job_schemas as bodies
from core.api import schemas
from core.client.rows import Rows
from core.client.steps import Steps, ask, ask_rows, call, exchange, plain


class JobCalls:
    """Both clients have them; bodies may be given as dicts."""

    @call
    def estimate_job(self, /, job: schemas.JobCreate | None = None, **fields: Any) -> Steps[bodies.JobEstimate]:
        """What a job would take if it were submitted now; the arguments are those of `submit_job`."""
        json = job.model_dump(mode="json", exclude_unset=True) if job is not None else fields
        return ask(bodies.JobEstimate, "POST", "/api/jobs/estimate", json=json)

    @call
    def clone_job(self, /, job_id: str, *, idempotency_key: str | None = None, **changes: Any) -> Steps[schemas.Job]:
        """Submit a job once more with other fields: ``clone_job(id, learning_rate=1e-4, lora={"rank": 4})``."""
        headers = {} if idempotency_key is None else {"Idempotency-Key": idempotency_key}
        return ask(schemas.Job, "POST", f"/api/jobs/{job_id}/clone", json={"changes": changes}, headers=headers)

    @call
    def move_job(self, job_id: str, to: Literal["up", "down", "top", "bottom"]) -> Steps[schemas.Job]:
        """Change a waiting job's place in the queue."""
        return ask(schemas.Job, "POST", f"/api/jobs/{job_id}/move", json={"to": to})

    @call
    def job_queue(self, limit: int = 100) -> Steps[Rows[schemas.Job]]:
        """The job that runs, then the first waiting ones as they will be handed out."""
        return ask_rows(schemas.Job, "/api/jobs/queue", params={"limit": limit})

    @call
    def delete_job(self, job_id: str) -> Steps[None]:
        """Forget a job that has ended; the adapter that it made stays."""
        yield from exchange("DELETE", f"/api/jobs/{job_id}")

    @call
    def job_outlook(self, job_id: str) -> Steps[bodies.JobOutlook]:
        """Why it waits or is slow, and when it will be through."""
        return ask(bodies.JobOutlook, "GET", f"/api/jobs/{job_id}/why")

    @call
    def job_samples(self, job_id: str) -> Steps[Rows[bodies.JobSample]]:
        """What its adapter answered to its prompts, by step."""
        return ask_rows(bodies.JobSample, f"/api/jobs/{job_id}/samples")

    @call
    def compare_jobs(self, job_ids: Sequence[str]) -> Steps[bodies.JobComparison]:
        """Two to twelve jobs side by side."""
        return ask(bodies.JobComparison, "GET", "/api/jobs/compare", params={"job_id": list(job_ids)})

    # ---- schedules ---------------------------------------------------------------------------------------------------

    @call
    def schedules(self, limit: int = 100, cursor: str | None = None) -> Steps[schemas.Page[bodies.Schedule]]:
        """Newest first; the next page has `cursor` = this page's `next`."""
        return ask(schemas.Page[bodies.Schedule], "GET", "/api/schedules", params=_page(limit, cursor))

    @call
    def schedule(self, schedule_id: str) -> Steps[bodies.Schedule]:
        return ask(bodies.Schedule, "GET", f"/api/schedules/{schedule_id}")

    @call
    def create_schedule(
        self, /, name: str, cron: str, job: schemas.JobCreate | dict[str, Any], **options: Any
    ) -> Steps[bodies.Schedule]:
        """Submit `job` whenever the cron line says; `options`: timezone, continued, only_new_data, enabled."""
        json = {"name": name, "cron": cron, "job": plain(job), **options}
        return ask(bodies.Schedule, "POST", "/api/schedules", json=json)

    @call
    def update_schedule(self, /, schedule_id: str, **changes: Any) -> Steps[bodies.Schedule]:
        """Change name, cron, timezone, job, continued, only_new_data or enabled."""
        json = {name: plain(value) for name, value in changes.items()}
        return ask(bodies.Schedule, "PATCH", f"/api/schedules/{schedule_id}", json=json)

    @call
    def run_schedule(self, schedule_id: str) -> Steps[bodies.Schedule]:
        """Make a run's job now; `last_message` says how it went."""
        return ask(bodies.Schedule, "POST", f"/api/schedules/{schedule_id}/run")

    @call
    def delete_schedule(self, schedule_id: str) -> Steps[None]:
        yield from exchange("DELETE", f"/api/schedules/{schedule_id}")

    # ---- webhooks ----------------------------------------------------------------------------------------------------

    @call
    def webhooks(self, limit: int = 100, cursor: str | None = None) -> Steps[schemas.Page[bodies.Webhook]]:
        return ask(schemas.Page[bodies.Webhook], "GET", "/api/webhooks", params=_page(limit, cursor))

    @call
    def create_webhook(
        self, url: str, events: Sequence[str] = (), job_id: str | None = None
    ) -> Steps[bodies.WebhookWithSecret]:
        """Have events sent to `url`, all kinds unless some are named; the secret is told this once."""
        json = {"url": url, "events": list(events), "job_id": job_id}
        return ask(bodies.WebhookWithSecret, "POST", "/api/webhooks", json=json)

    @call
    def update_webhook(
        self, webhook_id: str, *, events: Sequence[str] | None = None, enabled: bool | None = None
    ) -> Steps[bodies.Webhook]:
        """Change what is given and not None."""
        given = {"events": list(events) if events is not None else None, "enabled": enabled}
        json = {name: value for name, value in given.items() if value is not None}
        return ask(bodies.Webhook, "PATCH", f"/api/webhooks/{webhook_id}", json=json)

    @call
    def delete_webhook(self, webhook_id: str) -> Steps[None]:
        yield from exchange("DELETE", f"/api/webhooks/{webhook_id}")

    @call
    def test_webhook(self, webhook_id: str) -> Steps[bodies.Delivery]:
        return ask(bodies.Delivery, "POST", f"/api/webhooks/{webhook_id}/test")

    @call
    def webhook_deliveries(
        self, webhook_id: str, limit: int = 100, cursor: str | None = None
    ) -> Steps[schemas.Page[bodies.Delivery]]:
        """Newest first, with the last attempt's outcome."""
        path = f"/api/webhooks/{webhook_id}/deliveries"
        return ask(schemas.Page[bodies.Delivery], "GET", path, params=_page(limit, cursor))

    @call
    def retry_delivery(self, webhook_id: str, delivery_id: int) -> Steps[bodies.Delivery]:
        return ask(bodies.Delivery, "POST", f"/api/webhooks/{webhook_id}/deliveries/{delivery_id}/retry")

    # ---- quotas ------------------------------------------------------------------------------------------------------

    @call
    def quota(self, tenant: str) -> Steps[bodies.Quota]:
        """A tenant's limits and what it uses of them now."""
        return ask(bodies.Quota, "GET", f"/api/quotas/{tenant}")

    @call
    def set_quota(
        self,
        tenant: str,
        *,
        finetune_tokens_day: int | None = None,
        running_jobs: int | None = None,
        waiting_jobs: int | None = None,
        max_priority: int | None = None,
    ) -> Steps[bodies.Quota]:
        """Set all of a tenant's limits; None: none. `max_priority` is the highest that its jobs may be given; None: 0,
        and any for the platform's own tenant."""
        update = bodies.QuotaUpdate(
            finetune_tokens_day=finetune_tokens_day,
            running_jobs=running_jobs,
            waiting_jobs=waiting_jobs,
            max_priority=max_priority,
        )
        return ask(bodies.Quota, "PUT", f"/api/quotas/{tenant}", json=update.model_dump())


def _page(limit: int, cursor: str | None) -> dict[str, Any]:
    return {"limit": limit} if cursor is None else {"limit": limit, "cursor": cursor}
