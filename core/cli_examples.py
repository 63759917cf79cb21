"""Examples in the help of every command; a test parses each of them."""

from __future__ import annotations

import typer

# In the order in which help lists the commands.
EXAMPLES: dict[str, tuple[str, ...]] = {
    "up": (
        "harli up",
        "harli up --demo",
        "harli up --no-console",
    ),
    "down": ("harli down",),
    "doctor": (
        "harli doctor",
        "harli doctor --json",
    ),
    "logs": (
        "harli logs engine --follow",
        "harli logs job-3f9a1c2b4d5e --lines 200",
    ),
    "submit": (
        "harli submit --dataset rows.jsonl --adapter support-bot --watch",
        "harli submit --dataset support --adapter support-bot --from support-bot --epochs 1",
        "harli submit --dataset support --adapter support-large --base Qwen3-8B",
        "harli submit --dataset support --adapter support-bot --rank 16 --lr 5e-4 --priority 10 --key nightly-17",
    ),
    "jobs list": (
        "harli jobs list",
        "harli jobs list --state running --json",
    ),
    "jobs queue": ("harli jobs queue",),
    "jobs show": ("harli jobs show job-3f9a1c2b4d5e",),
    "jobs watch": ("harli jobs watch job-3f9a1c2b4d5e",),
    "jobs pause": ("harli jobs pause job-3f9a1c2b4d5e",),
    "jobs resume": ("harli jobs resume job-3f9a1c2b4d5e",),
    "jobs stop": ("harli jobs stop job-3f9a1c2b4d5e --save",),
    "jobs clone": ("harli jobs clone job-3f9a1c2b4d5e --set learning_rate=1e-4 --set lora.rank=4",),
    "jobs move": ("harli jobs move job-3f9a1c2b4d5e top",),
    "jobs why": ("harli jobs why job-3f9a1c2b4d5e",),
    "jobs samples": ("harli jobs samples job-3f9a1c2b4d5e",),
    "jobs delete": ("harli jobs delete job-3f9a1c2b4d5e",),
    "chat": (
        'harli chat "Where is Madrid?"',
        'harli chat --model support-bot --max-tokens 80 "My parcel is late."',
        "harli chat --model support-bot",
    ),
    "datasets list": ("harli datasets list",),
    "datasets upload": (
        "harli datasets upload rows.jsonl",
        "harli datasets upload tickets.csv --name support --column prompt=question --column completion=answer",
        "harli datasets upload rows.parquet --name support --new-version",
    ),
    "datasets preview": ("harli datasets preview tickets.csv",),
    "datasets rows": ("harli datasets rows support --offset 100 --limit 5",),
    "datasets show": ("harli datasets show support",),
    "datasets delete": ("harli datasets delete support",),
    "adapters list": ("harli adapters list",),
    "adapters show": ("harli adapters show support-bot",),
    "adapters upload": ("harli adapters upload ./my-peft-folder --name support-bot",),
    "adapters deploy": (
        "harli adapters deploy support-bot --wait",
        "harli adapters deploy support-bot --version 2",
    ),
    "adapters undeploy": ("harli adapters undeploy support-bot",),
    "adapters download": ("harli adapters download support-bot --to support-bot.zip",),
    "adapters delete": ("harli adapters delete support-bot --version 1",),
    "adapters promote": ("harli adapters promote support-bot prod --version 3",),
    "adapters rollback": ("harli adapters rollback support-bot prod",),
    "adapters unalias": ("harli adapters unalias support-bot prod",),
    "adapters merge": ("harli adapters merge both tone@2=1.0 facts@prod=0.5",),
    "adapters export": ("harli adapters export support-bot --to merged.tar",),
    "targets show": ("harli targets show",),
    "targets set": (
        "harli targets set itl=60 ttft=2000@0.95",
        "harli targets set itl=60 'itl=40 mon-fri 09:00-17:00 Europe/Berlin' acme/tpot=80",
    ),
    "targets frontier": ("harli targets frontier",),
    "compare": ("harli compare job-3f9a1c2b4d5e job-77aa01b2c3d4",),
    "schedules create": ("harli schedules create nightly --cron '0 3 * * *' --dataset support --adapter support-bot",),
    "schedules run": ("harli schedules run sched-3f9a1c2b4d5e",),
    "schedules on": ("harli schedules on sched-3f9a1c2b4d5e",),
    "schedules off": ("harli schedules off sched-3f9a1c2b4d5e",),
    "schedules delete": ("harli schedules delete sched-3f9a1c2b4d5e",),
    "webhooks create": ("harli webhooks create https://hooks.example/harli --event job.succeeded",),
    "webhooks test": ("harli webhooks test hook-3f9a1c2b4d5e",),
    "webhooks deliveries": ("harli webhooks deliveries hook-3f9a1c2b4d5e",),
    "webhooks delete": ("harli webhooks delete hook-3f9a1c2b4d5e",),
    "alerts list": ("harli alerts list --all",),
    "alerts rules": ("harli alerts rules",),
    "alerts set": ("harli alerts set slow itl_p99_ms above 80 --for 60",),
    "alerts delete": ("harli alerts delete slow",),
    "notices": (
        "harli notices",
        "harli notices --limit 5 --json",
    ),
    "simulate": ("harli simulate trace.csv --device h200 --policy solo --policy hybrid --target 9 --html report.html",),
    "whatif": ("harli whatif --device h200 --batch 32 --target 8..60 --now 12",),
    "profile show": ("harli profile show",),
    "serve": ("harli serve",),
    "whoami": ("harli whoami",),
    "token create": (
        "harli token create laptop --days 30",
        "harli token create grafana --read-only",
    ),
    "token list": ("harli token list",),
    "token revoke": ("harli token revoke tok-3f9a1c2b4d5e",),
    "users list": ("harli users list --tenant acme",),
    "users create": ("harli users create anna --tenant acme --role operator",),
    "users set-role": ("harli users set-role anna admin --tenant acme",),
    "users disable": ("harli users disable anna",),
    "users enable": ("harli users enable anna",),
    "tenants list": ("harli tenants list",),
    "tenants create": ("harli tenants create acme",),
    "tenants suspend": ("harli tenants suspend acme",),
    "tenants restore": ("harli tenants restore acme",),
    "quota": (
        "harli quota acme",
        "harli quota acme --tokens-a-day 2000000 --running 1 --waiting 10 --max-priority 5",
    ),
    "audit": (
        "harli audit",
        "harli audit --user anna --outcome refused",
    ),
}


_PLACES = {name: place for place, name in enumerate(dict.fromkeys(path.split()[0] for path in EXAMPLES))}


def place(name: str) -> int:
    """Where help lists a command; those without examples come last."""
    return _PLACES.get(name, len(_PLACES))


def add(app: typer.Typer, path: tuple[str, ...] = ()) -> None:
    """Put the examples under the help of the commands of `app`, which stands at `path`."""
    for command in app.registered_commands:
        name = command.name or (command.callback.__name__.replace("_", "-") if command.callback else "")
        if (found := EXAMPLES.get(" ".join((*path, name)))) is not None:
            # \b: the lines stay lines.
            command.epilog = "\b\nExamples:\n" + "\n".join(f"  {line}" for line in found)
    for group in app.registered_groups:
        if group.typer_instance is not None:
            add(group.typer_instance, (*path, str(group.name)))
