"""Progress that updates in place: a notebook's output, a terminal's line."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from core.api import schemas
from core.client import html
from core.client.files import Progress

_PAUSE_S = 0.1


def job_progress() -> Callable[[schemas.Job], None]:
    """For ``harli.wait(job.id, job_progress())``: the job as it stands, in one place."""
    show = _place()

    def update(job: schemas.Job) -> None:
        step = f"step {job.step} of {job.total_steps}" if job.total_steps else f"step {job.step}"
        loss = f", loss {job.loss:.4f}" if job.loss is not None else ""
        why = f" ({job.waiting_reason})" if job.waiting_reason else ""
        show(f"{job.name}: {job.state}, {step}{loss}{why}", html.job(job))

    return update


def upload_progress() -> Progress:
    """For ``harli.upload_dataset(path, on_progress=upload_progress())``."""
    show = _place()
    shown_at = 0.0

    def update(sent: int, total: int) -> None:
        nonlocal shown_at
        if sent < total and time.monotonic() - shown_at < _PAUSE_S:
            return
        shown_at = time.monotonic()
        share = sent / total if total else 1.0
        text = f"sent {sent:,} of {total:,} bytes"
        show(text, f"<div>{text}{html.bar(share)}</div>")

    return update


def message_progress() -> Callable[[str], None]:
    """For ``connect(start=True)``: one sentence after the other."""
    show = _place()
    return lambda text: show(text, f"<div>{html.text(text)}</div>")


def _place() -> Callable[[str, str], None]:
    """Where to show (text, HTML) so that the next one takes the place of the one before."""
    if not _in_a_notebook():
        return _terminal()
    from IPython.display import display

    handle = display({"text/plain": ""}, raw=True, display_id=True)  # type: ignore[no-untyped-call]

    def show(text: str, picture: str) -> None:
        handle.update({"text/plain": text, "text/html": picture}, raw=True)

    return show


def _terminal() -> Callable[[str, str], None]:
    """One line on a terminal; elsewhere, such as in a file, a line for each new text."""
    before = ""

    def show(text: str, _picture: str) -> None:
        nonlocal before
        if text != before:
            before = text
            sys.stderr.write(f"\r\x1b[K{text}" if sys.stderr.isatty() else f"{text}\n")
            sys.stderr.flush()

    return show


def _in_a_notebook() -> bool:
    """Whether a kernel runs this, which shows more than text."""
    if "IPython" not in sys.modules:
        return False
    shell = sys.modules["IPython"].get_ipython()
    return shell is not None and hasattr(shell, "kernel")
