"""The calls around data sets and adapters beyond storing and deploying them: looks before an upload, rows as the model
sees them, aliases, merges, operations."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from core.api import schemas
from core.client.files import HEAD_BYTES, head_of, opened
from core.client.rows import Rows
from core.client.steps import Steps, ask, ask_rows, call, download, exchange, failure


class IntakeCalls:
    """Both clients have them."""

    # ---- data sets ---------------------------------------------------------------------------------------------------

    @call
    def preview_dataset(
        self,
        source: str | Path | BinaryIO,
        *,
        filename: str | None = None,
        columns: Mapping[str, str] | None = None,
    ) -> Steps[schemas.DatasetPreview]:
        """How a file would be read: its format, its columns and what they are taken for (or `columns`, role → column),
        its first rows. Of a text file only the beginning is sent, and nothing is stored."""
        with opened(source, filename) as (file, label):
            content = head_of(file)
            params: dict[str, Any] = {"partial": len(content) == HEAD_BYTES}
            if columns:
                params["columns"] = json.dumps(dict(columns))
            return (
                yield from ask(
                    schemas.DatasetPreview, "POST", "/api/uploads/preview", params=params,
                    files={"file": (label, content)}, read_timeout_s=600,
                )
            )  # fmt: skip

    @call
    def dataset_rendered(self, dataset: str, offset: int = 0, limit: int = 10) -> Steps[Rows[schemas.RenderedRow]]:
        """Rows as the served model's chat template writes them, token by token, with the loss mask."""
        params = {"offset": offset, "limit": limit}
        return ask_rows(schemas.RenderedRow, f"/api/datasets/{dataset}/rendered", params=params)

    # ---- adapters ----------------------------------------------------------------------------------------------------

    @call
    def promote_adapter(self, name: str, alias: str, version: int | None = None) -> Steps[schemas.Adapter]:
        """Let ``name@alias``, under which the engine serves it, stand for `version` (None: the newest) from now on."""
        return ask(schemas.Adapter, "PUT", f"/api/adapters/{name}/aliases/{alias}", json={"version": version})

    @call
    def roll_back_adapter(self, name: str, alias: str) -> Steps[schemas.Adapter]:
        """Let ``name@alias`` stand for the version that it was before. Raises Conflict when there was none."""
        return ask(schemas.Adapter, "POST", f"/api/adapters/{name}/aliases/{alias}/rollback")

    @call
    def delete_alias(self, name: str, alias: str) -> Steps[None]:
        """Take ``name@alias`` away; the version stays."""
        yield from exchange("DELETE", f"/api/adapters/{name}/aliases/{alias}")

    @call
    def merge_adapters(
        self, name: str, parts: Sequence[str] | Mapping[str, float], *, new_version: bool = False
    ) -> Steps[schemas.Adapter]:
        """Store the sum of adapters as a new one: ``merge_adapters("both", {"tone@2": 1.0, "facts@prod": 0.5})``. The
        ranks add up and must stay within the engine's."""
        weights = parts if isinstance(parts, Mapping) else dict.fromkeys(parts, 1.0)
        body = {"parts": [{"adapter": part, "weight": weight} for part, weight in weights.items()]}
        params = {"new_version": new_version}
        return ask(schemas.Adapter, "POST", f"/api/adapters/{name}/merge", params=params, json=body)

    @call
    def export_merged(self, name: str, version: int | None = None) -> Steps[schemas.Operation]:
        """Have the served model with the adapter merged into it written, in the background: `wait_operation`, then
        `download_merged`."""
        params = {} if version is None else {"version": version}
        return ask(schemas.Operation, "POST", f"/api/adapters/{name}/merged", params=params)

    @call
    def download_merged(self, operation_id: str, destination: str | Path) -> Steps[Path]:
        """Write the tar of a merged model's folder to `destination` (a file, or a folder to put it in)."""
        return download(f"/api/operations/{operation_id}/download", Path(destination))

    # ---- operations --------------------------------------------------------------------------------------------------

    @call
    def operation(self, operation_id: str) -> Steps[schemas.Operation]:
        return ask(schemas.Operation, "GET", f"/api/operations/{operation_id}")

    @call
    def operations(self, limit: int = 50) -> Steps[Rows[schemas.Operation]]:
        """Newest first; those of the last day."""
        return ask_rows(schemas.Operation, "/api/operations", params={"limit": limit})

    @call
    def cancel_operation(self, operation_id: str) -> Steps[schemas.Operation]:
        """It ends within a second and leaves nothing behind."""
        return ask(schemas.Operation, "POST", f"/api/operations/{operation_id}/cancel")

    @call
    def wait_operation(
        self,
        operation_id: str,
        on_update: Callable[[schemas.Operation], None] | None = None,
        *,
        poll_s: float = 0.5,
    ) -> Steps[schemas.Operation]:
        """The operation once it has succeeded. Raises its error when it failed, Conflict when it was cancelled."""
        pause_s = 0.0
        while True:
            path = f"/api/operations/{operation_id}"
            found = yield from ask(schemas.Operation, "GET", path, after_s=pause_s)
            if on_update is not None:
                on_update(found)
            if found.state == "succeeded":
                return found
            if found.state != "running":
                error = found.error or schemas.OperationError(
                    code="cancelled", message=f"{found.subject} was cancelled", status=409
                )
                raise failure(error.status, error, error.report)
            pause_s = poll_s
