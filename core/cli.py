"""Serve a model and finetune adapters on the same engine.

\b
A first session:
  harli up                            # in a terminal of its own; prints the console's address
  harli submit --dataset rows.jsonl --adapter support-bot --watch
  harli chat --model support-bot

`up`, `down`, `serve` and `doctor` work on this machine; every other command is a client of the API at HARLI_HOST and
HARLI_API_PORT, and shows it HARLI_TOKEN, or on the API's own machine the local admin's token. Every command takes
--help, which has examples, and almost all take --json.

Exit status: 0 done, 1 an error (``error: MESSAGE [CODE]`` on standard error) or a watched job that did
not succeed, 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer
from typer.core import TyperGroup

from core import cli_examples
from core.cli_alerts import alerts as alerts_group
from core.cli_intake import mount as mount_intake
from core.cli_jobs import mount as mount_jobs
from core.cli_jobs import show_estimate
from core.cli_profile import group as profile_group
from core.cli_shared import AsJson, JobId, Named, connected, pair, plain, settings
from core.cli_tenants import mount as mount_tenants
from core.errors import HarliError, NotFound
from core.simulate import cli as simulator

if TYPE_CHECKING:
    from core.api import schemas
    from core.client import Client

# Only `harli up`, `serve` and `doctor` need more than the client; what a command needs is imported inside it, so that
# none waits for the libraries of another.


class Commands(TyperGroup):
    """Prints the errors that a caller can act on, without a traceback; lists the commands of a first day first."""

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(super().list_commands(ctx), key=cli_examples.place)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except HarliError as error:
            print(f"error: {plain(error.message)} [{error.code}]", file=sys.stderr)
            raise typer.Exit(1) from error
        except BrokenPipeError:
            raise  # whoever read has read enough
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            print(f"error: {plain(where)}{error.strerror or error} [os_error]", file=sys.stderr)
            raise typer.Exit(1) from error
        except KeyboardInterrupt:
            raise typer.Exit(130) from None


app = typer.Typer(
    cls=Commands, no_args_is_help=True, add_completion=False, help=__doc__, rich_markup_mode=None,
    context_settings={"max_content_width": 120},
)  # fmt: skip
jobs = typer.Typer(invoke_without_command=True)
targets = typer.Typer(invoke_without_command=True)
datasets = typer.Typer(invoke_without_command=True)
adapters = typer.Typer(invoke_without_command=True)
for _name, _group in (("jobs", jobs), ("targets", targets), ("datasets", datasets), ("adapters", adapters)):
    app.add_typer(_group, name=_name)
app.command()(simulator.simulate)
app.command()(simulator.whatif)
app.add_typer(profile_group, name="profile")
app.add_typer(alerts_group, name="alerts")
mount_tenants(app)
mount_jobs(app, jobs)
mount_intake(datasets, adapters)

Limit = Annotated[int, typer.Option("--limit", min=1, max=1000, help="How many, newest first.")]


# ---- this machine ----------------------------------------------------------------------------------------------------


@app.command()
def up(
    demo: Annotated[bool, typer.Option("--demo", help="Replay the sample trace and submit the sample job.")] = False,
    console: Annotated[bool, typer.Option("--console/--no-console", help="Start the browser console.")] = True,
) -> None:
    """Start API, engine and console, and keep them running until Ctrl-C."""
    from core import supervise

    supervise.up(settings(), demo=demo, console=console)


@app.command()
def down() -> None:
    """Stop the `harli up` of this data directory. A running job writes a checkpoint first."""
    from core import supervise

    supervise.down(settings().data_dir)


@app.command()
def serve() -> None:
    """Start the engine alone, in the foreground."""
    from core.serving.launch import serve as run
    from core.serving.model_folder import ensure

    wanted = settings()
    folder = ensure(wanted, lambda fraction, step: print(f"{fraction:4.0%} {step}", flush=True))
    run(wanted, folder, say=lambda text: print(text, flush=True))


@app.command()
def doctor(json: AsJson = False) -> None:
    """Say what this machine has, what will be used and what is missing. Exit status 1 when something needed is."""
    from core import printing
    from core.doctor import examine, is_well, show

    findings = examine(settings())
    if json:
        printing.as_json({"ok": is_well(findings), "findings": findings})
    else:
        show(findings)
    if not is_well(findings):
        raise typer.Exit(1)


@app.command()
def logs(
    name: Annotated[str, typer.Argument(metavar="PART|JOB", help="api, engine, console, demo, or a job's id.")],
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, help="How many of the last lines.")] = 50,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until Ctrl-C.")] = False,
) -> None:
    """Show the log of a part of `harli up`, or of a job."""
    from core.supervise import Name

    parts = get_args(Name)
    if name not in parts and not name.startswith("job-"):
        raise typer.BadParameter(f"{name!r} is neither a part ({', '.join(parts)}) nor the id of a job (job-...)")
    (_part_log if name in parts else _job_log)(name, lines, follow)


def _part_log(name: str, lines: int, follow: bool) -> None:
    from core.supervise import tail

    path = settings().data_dir / "logs" / f"{name}.log"
    if not path.exists():
        raise NotFound("log_missing", f"there is no log {path}; `harli up` writes it", "name")
    end = path.stat().st_size
    print(tail(path, lines))
    while follow:
        time.sleep(0.3)
        with path.open("rb") as file:
            # A new start begins a new file.
            file.seek(end if path.stat().st_size >= end else 0)
            sys.stdout.write(file.read().decode("utf-8", "replace"))
            end = file.tell()
        sys.stdout.flush()


def _job_log(job_id: str, lines: int, follow: bool) -> None:
    from core.client import TERMINAL

    with connected() as client:
        seen = 0
        first = True
        while True:
            ended = client.job(job_id).state in TERMINAL
            new = client.job_log(job_id, after=seen)
            for line in new[-lines:] if first else new:
                print(f"{line.time:%H:%M:%S} {plain(line.message)}", flush=True)
            seen, first = (new[-1].id if new else seen), False
            if not follow or ended:
                return
            time.sleep(1.0)


# ---- jobs ------------------------------------------------------------------------------------------------------------


@app.command()
def submit(
    dataset: Annotated[str, typer.Option(help="A data set's name, or a file, which is uploaded first.")],
    adapter: Annotated[str, typer.Option(help="The name under which the adapter is stored and served.")],
    name: Annotated[str | None, typer.Option(help="A name for the job.")] = None,
    preset: Annotated[str | None, typer.Option(help="quick, balanced or thorough; fills in what is not given.")] = None,
    start_from: Annotated[
        str | None, typer.Option("--from", help="The adapter to go on from (NAME or NAME@V).")
    ] = None,
    base: Annotated[
        str | None, typer.Option(help="Another base model than the served one, of those that the engine has.")
    ] = None,
    rank: Annotated[int | None, typer.Option(help="LoRA rank.")] = None,
    alpha: Annotated[float | None, typer.Option(help="LoRA alpha.")] = None,
    dropout: Annotated[float | None, typer.Option(help="LoRA dropout.")] = None,
    modules: Annotated[str | None, typer.Option(help="Target modules, separated by commas.")] = None,
    rslora: Annotated[bool | None, typer.Option("--rslora", help="Rank-stabilised LoRA.")] = None,
    learning_rate: Annotated[float | None, typer.Option("--learning-rate", "--lr")] = None,
    schedule: Annotated[str | None, typer.Option(help="cosine, linear or constant.")] = None,
    epochs: Annotated[float | None, typer.Option(help="Passes over the data (3 unless --max-steps).")] = None,
    max_steps: Annotated[int | None, typer.Option(help="Optimizer steps, instead of epochs.")] = None,
    micro_batch_tokens: Annotated[int | None, typer.Option(help="Tokens of a packed micro-batch.")] = None,
    accumulation: Annotated[int | None, typer.Option(help="Micro-batches of an optimizer step.")] = None,
    sequence_length: Annotated[int | None, typer.Option(help="The longest row, in tokens.")] = None,
    evaluation_fraction: Annotated[float | None, typer.Option(help="Share of the rows held out.")] = None,
    evaluate_every: Annotated[int | None, typer.Option(help="Steps between evaluations.")] = None,
    patience: Annotated[
        int | None, typer.Option(help="End after so many evaluations in a row without improvement.")
    ] = None,
    keep_best: Annotated[
        bool | None, typer.Option("--keep-best", help="Store the adapter of the lowest evaluation loss.")
    ] = None,
    sample_prompt: Annotated[
        list[str] | None, typer.Option(help="To be answered by the adapter at each evaluation; may be repeated.")
    ] = None,
    checkpoint_every: Annotated[int | None, typer.Option(help="Steps between checkpoints.")] = None,
    seed: Annotated[int | None, typer.Option()] = None,
    priority: Annotated[
        int | None, typer.Option(help="-100 to 100; higher runs earlier. A tenant's quota bounds it, at first by 0.")
    ] = None,
    deadline: Annotated[
        str | None, typer.Option(help="Warn when it will not have ended by then: 2026-12-24T18:00+01:00.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what it would take, and submit nothing.")] = False,
    deploy: Annotated[bool | None, typer.Option("--deploy/--no-deploy", help="Serve the finished adapter.")] = None,
    key: Annotated[str | None, typer.Option(help="Idempotency key: the same key submits once.")] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Show its progress until it ends.")] = False,
    json: AsJson = False,
) -> None:
    """Submit a finetuning job. What is not given has the API's default."""
    from core import printing

    lora = _given(
        rank=rank,
        alpha=alpha,
        dropout=dropout,
        target_modules=modules.split(",") if modules else None,
        use_rslora=rslora,
    )
    with connected() as client:
        fields = _given(
            dataset=_uploaded(client, Path(dataset)) if Path(dataset).is_file() else dataset,
            adapter_name=adapter,
            name=name,
            preset=preset,
            base_model=base,
            initial_adapter=start_from,
            lora=lora or None,
            learning_rate=learning_rate,
            schedule=schedule,
            epochs=epochs,
            max_steps=max_steps,
            micro_batch_tokens=micro_batch_tokens,
            accumulation=accumulation,
            sequence_length=sequence_length,
            evaluation_fraction=evaluation_fraction,
            evaluate_every=evaluate_every,
            patience=patience,
            keep_best=keep_best,
            sample_prompts=sample_prompt or None,
            checkpoint_every=checkpoint_every,
            seed=seed,
            priority=priority,
            deadline=deadline,
            deploy=deploy,
        )
        if dry_run:
            show_estimate(client.estimate_job(**fields), json)
            return
        job = client.submit_job(idempotency_key=key, **fields)
        if watch:
            _watch(client, job.id, json)
        elif json:
            printing.as_json(job)
        else:
            printing.say(f"Job {job.id} is {job.state}; follow it with `harli jobs watch {job.id}`.")


def _given(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _uploaded(client: Client, file: Path) -> str:
    """The id of the data set with this file's content, sent unless it is there already."""
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    cursor: str | None = None
    while True:
        page = client.datasets(cursor=cursor)
        for dataset in page.items:
            if dataset.sha256 == digest:
                return dataset.id
        cursor = page.next
        if cursor is None:
            break
    with _upload_progress() as progress:
        return client.upload_dataset(file, on_progress=progress).id


def _watch(client: Client, job_id: str, json: bool) -> None:
    """Print a job's progress until it ends; exit status 1 unless it succeeds."""
    from core import printing

    told: set[tuple[str, int, bool]] = set()

    def show(job: schemas.Job) -> None:
        # A reason's figures change every second: it is told once a step.
        news = (job.state, job.step, job.waiting_reason is not None)
        if news in told:
            return
        told.add(news)
        loss = f"  loss {job.loss:.4f}" if job.loss is not None else ""
        why = f"  ({plain(job.waiting_reason)})" if job.waiting_reason else ""
        printing.err.print(f"{job.state:11} step {printing.steps(job)}{loss}{why}", markup=False)

    job = client.wait(job_id, show)
    if json:
        printing.as_json(job)
    elif job.state == "succeeded":
        made = f"{job.adapter_name}@{job.adapter_version}"
        if job.spec.deploy:
            printing.say(f"Adapter {made} is ready: `harli chat -m {job.adapter_name}`.")
        else:
            printing.say(f"Adapter {made} is stored: `harli adapters download {job.adapter_name}`.")
    if job.state != "succeeded":
        if job.error is not None:
            raise HarliError(job.error.code, f"job {job.id} {job.state}: {job.error.message}", job.error.param)
        raise typer.Exit(1)


@jobs.callback()
def jobs_group(ctx: typer.Context, json: AsJson = False) -> None:
    """Finetuning jobs; without a command, list them."""
    if ctx.invoked_subcommand is None:
        jobs_list(json=json)


@jobs.command("list")
def jobs_list(
    state: Annotated[str | None, typer.Option(help="Only those in this state.")] = None,
    limit: Limit = 50,
    json: AsJson = False,
) -> None:
    """List jobs, newest first."""
    from core import printing
    from core.api.schemas import JobState

    if state is not None and state not in get_args(JobState):
        raise typer.BadParameter(f"{state!r} is none of {', '.join(get_args(JobState))}", param_hint="--state")
    with connected() as client:
        items = client.jobs(state=state, limit=limit).items  # type: ignore[arg-type]
    printing.listing(items, printing.JOB_COLUMNS, "No jobs; submit one with `harli submit`.", json)


def _show_job(job: schemas.Job, json: bool) -> None:
    from core import printing

    if json:
        printing.as_json(job)
    else:
        printing.job_facts(job)


@jobs.command("show")
def jobs_show(job: JobId, json: AsJson = False) -> None:
    """Show one job."""
    with connected() as client:
        _show_job(client.job(job), json)


@jobs.command("pause")
def jobs_pause(job: JobId, json: AsJson = False) -> None:
    """Checkpoint a job and set it aside."""
    with connected() as client:
        _show_job(client.pause_job(job), json)


@jobs.command("resume")
def jobs_resume(job: JobId, json: AsJson = False) -> None:
    """Let a paused or interrupted job go on from its checkpoint."""
    with connected() as client:
        _show_job(client.resume_job(job), json)


@jobs.command("stop")
def jobs_stop(
    job: JobId,
    save: Annotated[bool, typer.Option("--save", help="Keep the adapter as it stands.")] = False,
    json: AsJson = False,
) -> None:
    """End a job."""
    with connected() as client:
        _show_job(client.stop_job(job, save=save), json)


@jobs.command("watch")
def jobs_watch(job: JobId, json: AsJson = False) -> None:
    """Show a job's progress until it ends. Ctrl-C leaves the job alone."""
    with connected() as client:
        _watch(client, job, json)


# ---- targets ---------------------------------------------------------------------------------------------------------


def _show_targets(found: schemas.Targets, json: bool) -> None:
    from core import printing

    if json:
        printing.as_json(found)
    else:
        printing.table(found.targets, printing.TARGET_COLUMNS, "No targets.")
        if any(target.tenant or target.windows for target in found.targets):
            printing.say("In force now:")
            printing.table(found.in_force, printing.IN_FORCE_COLUMNS, "None.")
        printing.say(f"version {found.version} ({found.origin}), {_standing(found)}")


def _standing(found: schemas.Targets) -> str:
    """Whether the engine plans with these targets."""
    if found.applied_version is None:
        return "no engine is ready to plan with it"
    if found.applied_version == found.version:
        return "in force in the engine"
    return f"on its way to the engine, which plans with version {found.applied_version}"


@targets.callback()
def targets_group(ctx: typer.Context, json: AsJson = False) -> None:
    """Latency targets that every decode step obeys; without a command, show them."""
    if ctx.invoked_subcommand is None:
        targets_show(json=json)


@targets.command("show")
def targets_show(json: AsJson = False) -> None:
    """Show the targets in force."""
    with connected() as client:
        _show_targets(client.targets(), json)


@targets.command("set")
def targets_set(
    wanted: Annotated[
        list[str],
        typer.Argument(
            metavar="[TENANT/]KIND=MS[@QUANTILE][ WINDOW]...",
            help="itl=60  acme/tpot=80@0.95  'itl=40 mon-fri 09:00-17:00 Europe/Berlin'",
        ),
    ],
    version: Annotated[int | None, typer.Option(help="Refuse when the targets are no longer of this version.")] = None,
    json: AsJson = False,
) -> None:
    """Replace the targets by those given, e.g. `harli targets set itl=60 ttft=2000@0.95`. One with days, hours or a
    zone counts in that part of the week and then goes before the one that always counts; one with a tenant counts for
    the requests of that tenant's adapters."""
    parsed = [_target(text) for text in wanted]
    with connected() as client:
        _show_targets(client.set_targets(parsed, version), json)


def _target(text: str) -> dict[str, Any]:
    from core import target_text

    try:
        return target_text.parse(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


@targets.command("frontier")
def targets_frontier(json: AsJson = False) -> None:
    """Show what each ITL target would give finetuning at the present load."""
    from core import printing

    with connected() as client:
        found = client.frontier()
    if json:
        printing.as_json(found)
        return
    if found.missing:
        printing.say(f"No frontier: {found.missing}.")
        return
    shown = sorted([*found.points, *([found.now] if found.now else [])], key=lambda point: point.target_ms)
    load = f"{found.batch} requests with {found.kv_tokens} KV tokens"
    printing.say(f"{found.policy}, {load}, from {found.source} figures")
    printing.table(shown, printing.FRONTIER_COLUMNS, "No points.")
    for note in found.notes:
        printing.say(f"note: {note}")


@app.command()
def notices(
    code: Annotated[list[str] | None, typer.Option("--code", help="guard, guard_lifted, targets ...")] = None,
    limit: Limit = 50,
    json: AsJson = False,
) -> None:
    """Show what the engine had to tell, newest first: the guard's reasons, fallbacks, other targets in force."""
    from core import printing

    with connected() as client:
        items = client.notices(code or (), limit=limit).items
    printing.listing(items, printing.NOTICE_COLUMNS, "No notices.", json)


# ---- data sets -------------------------------------------------------------------------------------------------------


@datasets.callback()
def datasets_group(ctx: typer.Context, json: AsJson = False) -> None:
    """Data sets to finetune on; without a command, list them."""
    if ctx.invoked_subcommand is None:
        datasets_list(json=json)


@datasets.command("list")
def datasets_list(limit: Limit = 50, json: AsJson = False) -> None:
    """List data sets, newest first."""
    from core import printing

    with connected() as client:
        items = client.datasets(limit=limit).items
    printing.listing(items, printing.DATASET_COLUMNS, "No data sets; send one with `harli datasets upload`.", json)


@datasets.command("upload")
def datasets_upload(
    file: Annotated[Path, typer.Argument(help="JSONL, JSON, CSV, TSV or Parquet.")],
    name: Annotated[str | None, typer.Option(help="Its name; else the file's.")] = None,
    column: Annotated[list[str] | None, typer.Option(metavar="ROLE=COLUMN", help="Where a role's text stands.")] = None,
    new_version: Annotated[bool, typer.Option("--new-version", help="Add a version to a name that exists.")] = False,
    json: AsJson = False,
) -> None:
    """Send a file, have it checked and stored."""
    columns = dict(pair(text) for text in column or [])
    with connected() as client, _upload_progress() as progress:
        found = client.upload_dataset(
            file, name, columns=columns or None, new_version=new_version, on_progress=progress
        )
    _show_dataset(found, json)


@contextmanager
def _upload_progress() -> Iterator[Any]:
    """A callback that draws the bytes sent, on a terminal."""
    from rich.progress import Progress

    from core import printing

    with Progress(console=printing.err, transient=True, disable=not printing.err.is_terminal) as bar:
        task = bar.add_task("sending", total=None)
        yield lambda sent, total: bar.update(task, completed=sent, total=total)


def _show_dataset(dataset: schemas.Dataset, json: bool) -> None:
    from core import printing

    if json:
        printing.as_json(dataset)
    else:
        printing.dataset_facts(dataset)


@datasets.command("show")
def datasets_show(name: Named, json: AsJson = False) -> None:
    """Show a data set and what the check found."""
    with connected() as client:
        _show_dataset(client.dataset(name), json)


@datasets.command("delete")
def datasets_delete(name: Named) -> None:
    """Delete a data set: one version by its id, all of them by name."""
    with connected() as client:
        client.delete_dataset(name)


# ---- adapters --------------------------------------------------------------------------------------------------------


def _show_adapter(adapter: schemas.Adapter, json: bool) -> None:
    from core import printing

    if json:
        printing.as_json(adapter)
    else:
        printing.adapter_facts(adapter)


Version = Annotated[int | None, typer.Option("--version", min=1, help="A version; else the newest.")]


@adapters.callback()
def adapters_group(ctx: typer.Context, json: AsJson = False) -> None:
    """LoRA adapters; without a command, list them."""
    if ctx.invoked_subcommand is None:
        adapters_list(json=json)


@adapters.command("list")
def adapters_list(limit: Limit = 50, json: AsJson = False) -> None:
    """List adapters by name."""
    from core import printing

    with connected() as client:
        items = client.adapters(limit=limit).items
    printing.listing(items, printing.ADAPTER_COLUMNS, "No adapters; train one with `harli submit`.", json)


@adapters.command("upload")
def adapters_upload(
    source: Annotated[Path, typer.Argument(help="A peft folder, or a zip or tar of one.")],
    name: Annotated[str | None, typer.Option(help="Its name; else the folder's.")] = None,
    new_version: Annotated[bool, typer.Option("--new-version", help="Add a version to a name that exists.")] = False,
    json: AsJson = False,
) -> None:
    """Send an adapter, have it checked and stored."""
    with connected() as client, _upload_progress() as progress:
        found = client.upload_adapter(source, name, new_version=new_version, on_progress=progress)
    _show_adapter(found, json)


@adapters.command("deploy")
def adapters_deploy(
    name: Named,
    version: Version = None,
    wait: Annotated[bool, typer.Option("--wait", help="Until the engine serves it.")] = False,
    json: AsJson = False,
) -> None:
    """Serve an adapter."""
    with connected() as client:
        found = client.deploy_adapter(name, version)
        _show_adapter(client.wait_for_adapter(name) if wait else found, json)


@adapters.command("undeploy")
def adapters_undeploy(name: Named, json: AsJson = False) -> None:
    """Stop serving an adapter."""
    with connected() as client:
        _show_adapter(client.undeploy_adapter(name), json)


@adapters.command("download")
def adapters_download(
    name: Named,
    destination: Annotated[Path, typer.Option("--to", help="A file, or a folder to put it in.")] = Path(),
    version: Version = None,
) -> None:
    """Save the peft folder as a zip."""
    with connected() as client:
        print(client.download_adapter(name, destination, version))


@adapters.command("delete")
def adapters_delete(
    name: Named,
    version: Annotated[int | None, typer.Option("--version", min=1, help="A version; else all of them.")] = None,
) -> None:
    """Undeploy and delete an adapter."""
    with connected() as client:
        client.delete_adapter(name, version)


# ---- chat ------------------------------------------------------------------------------------------------------------


@app.command()
def chat(
    message: Annotated[str | None, typer.Argument(help="One question; without it a conversation begins.")] = None,
    model: Annotated[str | None, typer.Option("--model", "-m", help="A deployed adapter; else the base model.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1)] = 256,
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.0,
    json: AsJson = False,
) -> None:
    """Chat with the served model or a deployed adapter."""
    from core import printing

    sampling = {"max_tokens": max_tokens, "temperature": temperature}
    with connected() as client:
        if json:
            if message is None:
                raise typer.BadParameter("--json needs the question as an argument")
            reply = client.chat(message, model, stream=False, **sampling)
            printing.as_json(vars(reply))
        elif message is not None:
            _say(client, [{"role": "user", "content": message}], model, sampling)
        else:
            _converse(client, model, sampling)


def _say(client: Client, turns: list[dict[str, Any]], model: str | None, sampling: dict[str, Any]) -> str:
    """Print the answer as it comes, and return it."""
    pieces = []
    for piece in client.chat(turns, model, **sampling):
        pieces.append(piece)
        print(plain(piece), end="", flush=True)
    print()
    return "".join(pieces)


def _converse(client: Client, model: str | None, sampling: dict[str, Any]) -> None:
    turns: list[dict[str, Any]] = []
    while True:
        try:
            question = input("> ")
        except EOFError:
            return
        if question.strip():
            turns.append({"role": "user", "content": question})
            turns.append({"role": "assistant", "content": _say(client, turns, model, sampling)})


cli_examples.add(app)


if __name__ == "__main__":
    app()
