"""What `harli up` shows: one live table of the parts on a terminal while they start, plain lines everywhere else."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from core.api.schemas import Part
from core.config import Settings

_STYLES = {"ready": "green", "backing_off": "yellow", "failed": "red", "stopped": "dim", "starting": "cyan"}


class Display:
    """Shows the parts' states; all methods return at once."""

    def __init__(self, settings: Settings, console: Console | None = None) -> None:
        self._settings = settings
        self._console = console or Console(highlight=False)
        self._begun = time.monotonic()
        self._rows: dict[str, tuple[Part, float | None]] = {}
        self._spinner = Spinner("dots")
        self._live: Live | None = None
        if self._console.is_terminal:
            # Without a thread of its own: the supervisor forks.
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()

    def starting(self, part: Part, fraction: float | None) -> None:
        """A part that starts is at `fraction` (None when it cannot tell) of what its message says."""
        before = self._rows.get(part.name)
        self._rows[part.name] = (part, fraction)
        if self._live is not None:
            self._refresh()
        elif fraction is not None and (before is None or before[0].message != part.message):
            self._line(part, f"{fraction:4.0%} {part.message}")

    def changed(self, part: Part) -> None:
        """A part's state changed."""
        self._rows[part.name] = (part, None)
        if self._live is not None:
            self._refresh()
        elif part.state == "ready":
            self._line(part, f"ready {part.url or ''}")
        elif part.state == "starting":
            self._line(part, "starting" if part.restarts == 0 else f"starting again (restart {part.restarts})")
        else:
            self._line(part, f"{part.state.replace('_', ' ')}: {part.message}" if part.message else part.state)

    def all_ready(self, parts: Sequence[Part]) -> None:
        """Everything answers: the addresses, once."""
        self._end_live()
        urls = {part.name: _reachable(part.url) for part in parts}
        seconds = time.monotonic() - self._begun
        self._console.print(f"\n[bold green]Harli is ready[/] after {seconds:.0f} s.")
        for label, url in (
            ("Console", urls.get("console")),
            ("API", f"{urls['api']}/api/docs" if urls.get("api") else None),
            ("OpenAI", f"{urls['api']}/v1  (base_url of its clients)" if urls.get("api") else None),
            ("Token", str(self._settings.token_file) if urls.get("api") else None),
        ):
            if url:
                self._console.print(f"  {label:8} {escape(url)}", soft_wrap=True)
        if "demo" in urls:
            self._console.print("  Demo     replays the sample trace and finetunes the sample data set")
        self._console.print(f"  Logs     {escape(str(self._settings.data_dir / 'logs'))}", soft_wrap=True)
        self._console.print("Ctrl-C stops all of it.")

    def stopping(self) -> None:
        """The group is asked to stop."""
        self._end_live()
        self._console.print("Stopping; a running job writes a checkpoint first. Ctrl-C again ends it at once.")

    def close(self) -> None:
        """Everything has ended."""
        self._end_live()
        self._console.print("Stopped.")

    def _line(self, part: Part, text: str) -> None:
        seconds = time.monotonic() - self._begun
        self._console.print(f"{seconds:6.1f} s  {part.name:8} {escape(text)}", soft_wrap=True)

    def _refresh(self) -> None:
        if self._live is not None:
            self._live.update(self._table(), refresh=True)

    def _end_live(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 1), expand=True)
        for width in (1, 8, 12):
            table.add_column(width=width, no_wrap=True)
        table.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
        for part, fraction in self._rows.values():
            style = _STYLES[part.state]
            table.add_row(
                self._spinner if part.state == "starting" else Text("●", style),
                part.name,
                Text(part.state.replace("_", " "), style),
                Text((part.url or "") if part.state == "ready" else part.message, "dim"),
            )
            if fraction is not None:
                table.add_row("", "", "", ProgressBar(total=1.0, completed=fraction, width=40))
        table.add_row("", "", Text(f"{time.monotonic() - self._begun:.0f} s", "dim"), "")
        return table


def _reachable(url: str | None) -> str | None:
    """A part that listens on every address is reached by this machine's name."""
    return url and url.replace("//0.0.0.0:", f"//{socket.gethostname()}:")
