"""Lists of the API's bodies, and frames of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeVar

from pydantic import BaseModel

from core.client import html

if TYPE_CHECKING:
    import pandas
    import polars

M = TypeVar("M")


class Rows(list[M]):
    """A list that a frame can be made of; in a notebook it is shown as a table, or as lines of what was measured."""

    def _repr_html_(self) -> str:
        return html.rows(self)

    def polars(self) -> polars.DataFrame:
        """A column a field; fields that hold other bodies become structs."""
        return frame(self)

    def pandas(self) -> pandas.DataFrame:
        """The same for pandas, which has to be installed."""
        return frame(self).to_pandas()


def frame(bodies: Iterable[object]) -> polars.DataFrame:
    """A polars frame of bodies of one kind, a row each: ``frame(harli.jobs().items)``."""
    import polars

    rows = [body.model_dump() for body in bodies if isinstance(body, BaseModel)]
    # The whole list decides a column's type: the first rows of a metric may all be None.
    return polars.DataFrame(rows, infer_schema_length=None)
