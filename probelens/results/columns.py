"""Columns of tables: what each is called, what is in it and in which unit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from probelens.results.types import said

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Column", "table"]


@dataclass(frozen=True)
class Column:
    """One column of a table of results.

    Args:
        name: Key of the rows.
        type: Type of its values, such as ``int`` or ``float | None``.
        meaning: What is in it, one sentence.
        unit: Unit of its numbers, "" for none.
        on: Which rows have it, in words; "" for all.
    """

    name: str
    type: Any
    meaning: str
    unit: str = ""
    on: str = ""

    def __str__(self) -> str:
        about = ", ".join(filter(None, [said(self.type), self.unit, self.on and f"on {self.on}"]))
        return f"{self.name} ({about}): {self.meaning}"


def table(rows: Iterable[Mapping[str, Any]], columns: Iterable[Column]) -> pd.DataFrame:
    """Rows as a DataFrame, declared columns first and in their order.

    Args:
        rows: Dicts from column to value.
        columns: Their declaration.

    Returns:
        Columns that no row has are left out; those that are not declared come last.
    """
    import pandas as pd

    found = pd.DataFrame(list(rows))
    declared = [column.name for column in columns if column.name in found.columns]
    return found[[*declared, *(name for name in found.columns if name not in declared)]]
