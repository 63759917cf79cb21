"""`harli jobs` beyond looking, pausing and stopping: estimates, clones, the queue's order, reasons, samples; `harli
compare`, `harli schedules`, `harli webhooks` and `harli quota`."""

from __future__ import annotations

import json as json_
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import typer

from core.cli_shared import AsJson, JobId, connected

if TYPE_CHECKING:
    from core.api import job_schemas, schemas
    from core.printing import Column

Place = Literal["up", "down", "top", "bottom"]

schedules = typer.Typer(invoke_without_command=True)
webhooks = typer.Typer(invoke_without_command=True)


def mount(app: typer.Typer, jobs: typer.Typer) -> None:
    """Add the commands to `harli` and `harli jobs`."""
    jobs.command("clone")(clone)
    jobs.command("queue")(queue)
    jobs.command("move")(move)
    jobs.command("why")(why)
    jobs.command("samples")(samples)
    jobs.command("delete")(delete)
    app.command("compare")(compare)
    app.command("quota")(quota)
    app.add_typer(schedules, name="schedules")
    app.add_typer(webhooks, name="webhooks")


# ---- jobs ------------------------------------------------------------------------------------------------------------


def show_estimate(found: job_schemas.JobEstimate, json: bool) -> None:
    """What a job would take, and what is not known of it."""
    from core import printing

    if json:
        printing.as_json(found)
        return
    speed = found.speed
    printing.facts(
        [
            ("rows", f"{found.training_rows:,} of {found.rows:,} for training"),
            ("steps", found.steps),
            ("tokens", f"{found.tokens:,}" if found.tokens is not None else None),
            ("evaluations", found.evaluations),
            ("speed", f"{speed.tokens_s:,.0f} tokens/s, measured {printing.age(speed.measured_at)}" if speed else None),
            ("seconds per step", found.seconds_per_step),
            ("seconds", round(found.seconds) if found.seconds is not None else None),
            ("waits, seconds", round(found.wait_s) if found.wait_s is not None else None),
            ("ends about", f"{found.eta:%Y-%m-%d %H:%M} UTC" if found.eta else None),
            ("memory", {True: "fits", False: "does not fit", None: "not known"}[found.memory.fits]),
            ("", found.memory.reason),
        ]
    )
    for note in found.notes:
        printing.say(f"[yellow]note[/] {printing.escape(note)}")


def clone(
    job: JobId,
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="learning_rate=1e-4  lora.rank=4")
    ] = None,
    json: AsJson = False,
) -> None:
    """Submit a job once more, with some fields changed."""
    from core import printing

    with connected() as client:
        made = client.clone_job(job, **_changes(changes or []))
    if json:
        printing.as_json(made)
    else:
        printing.say(f"Job {made.id} is {made.state}; follow it with `harli jobs watch {made.id}`.")


def _changes(given: Sequence[str]) -> dict[str, Any]:
    """``lora.rank=4`` as ``{"lora": {"rank": 4}}``; values are JSON, or text."""
    changes: dict[str, Any] = {}
    for text in given:
        path, equals, value = text.partition("=")
        if not equals or not path:
            raise typer.BadParameter(f"{text!r} is not FIELD=VALUE, as in learning_rate=1e-4", param_hint="--set")
        *folders, name = path.split(".")
        place = changes
        for folder in folders:
            place = place.setdefault(folder, {})
        try:
            place[name] = json_.loads(value)
        except json_.JSONDecodeError:
            place[name] = value
    return changes


def move(job: JobId, to: Annotated[str, typer.Argument(metavar="up|down|top|bottom")], json: AsJson = False) -> None:
    """Change a waiting job's place in the queue."""
    from core import printing

    if to not in get_args(Place):
        raise typer.BadParameter(f"{to!r} is none of {', '.join(get_args(Place))}", param_hint="TO")
    with connected() as client:
        moved = client.move_job(job, to)  # type: ignore[arg-type]
    if json:
        printing.as_json(moved)
    else:
        printing.say(printing.escape(f"Job {moved.id}: {moved.waiting_reason or moved.state}."))


def queue(json: AsJson = False) -> None:
    """Show the job that runs, then the waiting ones as they will be handed out."""
    from core import printing

    with connected() as client:
        found = client.job_queue()
    columns: Sequence[Column[schemas.Job]] = (
        ("ID", lambda job: job.id),
        ("NAME", lambda job: job.name),
        ("STATE", lambda job: job.state),
        ("PRIORITY", lambda job: job.priority),
        ("WAITS BECAUSE", lambda job: job.waiting_reason),
    )
    printing.listing(found, columns, "No job runs or waits.", json)


def why(job: JobId, json: AsJson = False) -> None:
    """Say why a job waits or is slow, and when it will be through."""
    from core import printing

    with connected() as client:
        outlook = client.job_outlook(job)
    if json:
        printing.as_json(outlook)
        return
    printing.say(printing.escape(f"{outlook.state}: {outlook.headline}"))
    for reason in outlook.reasons:
        printing.say(printing.escape(f"  {reason}"))
    printing.facts(
        [
            ("place in the queue", outlook.position),
            ("ends about", f"{outlook.eta:%Y-%m-%d %H:%M} UTC" if outlook.eta else "not known"),
            ("deadline", f"{outlook.deadline:%Y-%m-%d %H:%M} UTC" if outlook.deadline else None),
        ]
    )


def samples(job: JobId, json: AsJson = False) -> None:
    """Show what a job's adapter answered on the way."""
    from core import printing

    with connected() as client:
        found = client.job_samples(job)
    if json:
        printing.as_json(found)
    elif not found:
        printing.say("No samples; a job with --sample-prompt has them after each evaluation.")
    else:
        for sample in found:
            printing.say(f"[bold]step {sample.step}[/]  {printing.escape(sample.prompt)}")
            printing.say(f"    {printing.escape(sample.answer)}")


def delete(job: JobId) -> None:
    """Forget a job that has ended; its adapter stays."""
    from core import printing

    with connected() as client:
        client.delete_job(job)
    printing.say(f"Job {job} is forgotten.")


def compare(
    jobs: Annotated[list[str], typer.Argument(metavar="JOB...", help="Two to twelve jobs.")], json: AsJson = False
) -> None:
    """Show jobs side by side: what they were asked with differently, and what came of it."""
    from core import printing
    from core.api.job_schemas import MOST_COMPARED

    if not 2 <= len(jobs) <= MOST_COMPARED:
        raise typer.BadParameter(f"give two to {MOST_COMPARED} jobs, not {len(jobs)}", param_hint="JOB...")
    with connected() as client:
        found = client.compare_jobs(jobs)
    if json:
        printing.as_json(found)
        return
    # A row a fact, a column a job.
    rows: list[list[object]] = [[name, *values] for name, values in found.differing.items()]
    for label, field in (
        ("state", "state"), ("steps", "step"), ("tokens", "tokens"), ("first loss", "first_loss"), ("loss", "loss"),
        ("evaluation loss", "eval_loss"), ("lowest evaluation loss", "best_loss"), ("at step", "best_step"),
    ):  # fmt: skip
        rows.append([label, *(getattr(job, field) for job in found.jobs)])
    columns: list[Column[list[object]]] = [("", lambda row: row[0])]
    for number, job in enumerate(found.jobs, 1):
        columns.append((job.id, lambda row, number=number: row[number]))  # type: ignore[misc]
    printing.table(rows, columns, "Nothing to compare.")


def quota(
    tenant: Annotated[str, typer.Argument(metavar="TENANT")],
    tokens_a_day: Annotated[int | None, typer.Option(help="Finetuning tokens a day (UTC).")] = None,
    running: Annotated[int | None, typer.Option(help="Jobs that may run at a time.")] = None,
    waiting: Annotated[int | None, typer.Option(help="Jobs that may wait.")] = None,
    max_priority: Annotated[
        int | None, typer.Option(help="Highest priority that its jobs may be given, -100 to 100; at first 0.")
    ] = None,
    none: Annotated[bool, typer.Option("--none", help="Take all limits away; priorities are up to 0 again.")] = False,
    json: AsJson = False,
) -> None:
    """Show a tenant's limits and what it uses of them; with options, set them."""
    from core import printing

    given = {
        "finetune_tokens_day": tokens_a_day, "running_jobs": running, "waiting_jobs": waiting,
        "max_priority": max_priority,
    }  # fmt: skip
    with connected() as client:
        found = client.quota(tenant)
        if none or any(value is not None for value in given.values()):
            kept = {} if none else {name: getattr(found, name) for name in given}
            found = client.set_quota(
                tenant, **{**kept, **{name: value for name, value in given.items() if value is not None}}
            )
    if json:
        printing.as_json(found)
        return
    printing.facts(
        [
            ("tokens today", f"{found.tokens_today:,} of {_limit(found.finetune_tokens_day)}"),
            ("running jobs", f"{found.running_now} of {_limit(found.running_jobs)}"),
            ("waiting jobs", f"{found.waiting_now} of {_limit(found.waiting_jobs)}"),
            ("highest priority", found.max_priority),
        ]
    )


def _limit(value: int | None) -> str:
    return "any number" if value is None else f"{value:,}"


# ---- schedules -------------------------------------------------------------------------------------------------------


@schedules.callback()
def schedules_group(ctx: typer.Context, json: AsJson = False) -> None:
    """Jobs that are submitted by cron; without a command, list them."""
    if ctx.invoked_subcommand is not None:
        return
    from core import printing

    with connected() as client:
        found = client.schedules().items
    columns: Sequence[Column[job_schemas.Schedule]] = (
        ("ID", lambda schedule: schedule.id),
        ("NAME", lambda schedule: schedule.name),
        ("CRON", lambda schedule: f"{schedule.cron} {schedule.timezone}"),
        ("NEXT", lambda schedule: f"{schedule.next_run_at:%Y-%m-%d %H:%M} UTC" if schedule.next_run_at else "off"),
        ("LAST", lambda schedule: schedule.last_message),
    )
    printing.listing(found, columns, "No schedules; make one with `harli schedules create`.", json)


@schedules.command("create")
def schedules_create(
    name: Annotated[str, typer.Argument(metavar="NAME")],
    cron: Annotated[str, typer.Option(help="minute hour day month weekday, such as '0 2 * * *'.")],
    dataset: Annotated[str, typer.Option(help="A data set's name; each run takes its newest version.")],
    adapter: Annotated[str, typer.Option(help="The adapter; each run adds a version.")],
    timezone: Annotated[str, typer.Option(help="Whose clock the cron line means.")] = "UTC",
    continued: Annotated[bool, typer.Option("--continued", help="Go on from the adapter's newest version.")] = False,
    only_new_data: Annotated[bool, typer.Option("--only-new-data", help="Leave out runs without new data.")] = False,
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="preset=quick  lora.rank=4")
    ] = None,
    json: AsJson = False,
) -> None:
    """Submit a job again and again."""
    from core import printing

    job = {"dataset": dataset, "adapter_name": adapter, **_changes(changes or [])}
    with connected() as client:
        made = client.create_schedule(
            name, cron, job, timezone=timezone, continued=continued, only_new_data=only_new_data
        )
    if json:
        printing.as_json(made)
    else:
        printing.say(f"Schedule {made.id} runs next at {made.next_run_at:%Y-%m-%d %H:%M} UTC.")


Schedule = Annotated[str, typer.Argument(metavar="SCHEDULE", help="The schedule's id.")]


@schedules.command("run")
def schedules_run(schedule: Schedule) -> None:
    """Make a run's job now."""
    from core import printing

    with connected() as client:
        printing.say(printing.escape(f"{client.run_schedule(schedule).last_message}."))


@schedules.command("on")
def schedules_on(schedule: Schedule) -> None:
    """Let it run."""

    with connected() as client:
        client.update_schedule(schedule, enabled=True)


@schedules.command("off")
def schedules_off(schedule: Schedule) -> None:
    """Let it rest."""

    with connected() as client:
        client.update_schedule(schedule, enabled=False)


@schedules.command("delete")
def schedules_delete(schedule: Schedule) -> None:
    """Take it away; its jobs stay."""

    with connected() as client:
        client.delete_schedule(schedule)


# ---- webhooks --------------------------------------------------------------------------------------------------------

Webhook = Annotated[str, typer.Argument(metavar="WEBHOOK", help="The webhook's id.")]


@webhooks.callback()
def webhooks_group(ctx: typer.Context, json: AsJson = False) -> None:
    """Addresses that are told what happens to jobs; without a command, list them."""
    if ctx.invoked_subcommand is not None:
        return
    from core import printing

    with connected() as client:
        found = client.webhooks().items
    columns: Sequence[Column[job_schemas.Webhook]] = (
        ("ID", lambda webhook: webhook.id),
        ("URL", lambda webhook: webhook.url),
        ("EVENTS", lambda webhook: ", ".join(webhook.events) or "all"),
        ("JOB", lambda webhook: webhook.job_id),
        ("ON", lambda webhook: "yes" if webhook.enabled else "no"),
    )
    printing.listing(found, columns, "No webhooks; make one with `harli webhooks create URL`.", json)


@webhooks.command("create")
def webhooks_create(
    url: Annotated[str, typer.Argument(metavar="URL")],
    event: Annotated[list[str] | None, typer.Option(help="A kind of event, such as job.failed; all unless given.")] = (
        None
    ),
    job: Annotated[str | None, typer.Option(help="Of this job only.")] = None,
    json: AsJson = False,
) -> None:
    """Have events sent to an address."""
    from core import printing

    with connected() as client:
        made = client.create_webhook(url, event or (), job)
    if json:
        printing.as_json(made)
    else:
        printing.say(f"Webhook {made.id}. Its events are signed with this secret, which is shown this once:")
        printing.say(made.secret)


@webhooks.command("test")
def webhooks_test(webhook: Webhook) -> None:
    """Send it a test event."""

    with connected() as client:
        client.test_webhook(webhook)


@webhooks.command("deliveries")
def webhooks_deliveries(webhook: Webhook, json: AsJson = False) -> None:
    """Show what was sent to it, and how that went."""
    from core import printing

    with connected() as client:
        found = client.webhook_deliveries(webhook).items
    columns: Sequence[Column[job_schemas.Delivery]] = (
        ("ID", lambda delivery: delivery.id),
        ("WHEN", lambda delivery: delivery.created_at),
        ("EVENT", lambda delivery: delivery.event),
        ("STATUS", lambda delivery: delivery.status),
        ("ATTEMPTS", lambda delivery: delivery.attempts),
        ("ANSWER", lambda delivery: delivery.response_status),
        ("ERROR", lambda delivery: delivery.error),
    )
    printing.listing(found, columns, "Nothing was sent yet.", json)


@webhooks.command("delete")
def webhooks_delete(webhook: Webhook) -> None:
    """Take it away."""

    with connected() as client:
        client.delete_webhook(webhook)
