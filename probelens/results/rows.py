"""``Rows``: the base of results whose measurements are a list of rows, with lookup of one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from probelens.errors import InputError, nearest
from probelens.results.columns import table
from probelens.results.result import Result

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Rows"]


class Rows(Result):
    """Mixin for results whose measurements are a list of rows, each a dict from column to value.

    ``columns`` declares every key that a row may have.
    """

    rows: list[dict[str, Any]]

    def to_dataframe(self) -> pd.DataFrame:
        """The rows as a table.

        Returns:
            One row per measurement, columns in the order of ``columns``; those that no row has are left out.
        """
        return table(self.rows, self.columns)

    def find(self, **where: Any) -> dict[str, Any]:
        """The row with these values.

        Args:
            where: Column to value.

        Returns:
            The row itself, as in ``rows``.

        Raises:
            InputError: An unknown column, no such row, or several.

        Examples:
            >>> from probelens.models.evaluation import EvalResult
            >>> row = {"label": "state", "length": 40, "span": "all", "accuracy": 0.9}
            >>> EvalResult("parity", 40, [row]).find(length=40, span="all")["accuracy"]
            0.9
        """
        known = list(dict.fromkeys(key for row in self.rows for key in row))
        for name in where:
            if name not in known:
                raise InputError(f"no column {name!r}. Nearest: {nearest(name, known) or known}")
        found = [row for row in self.rows if all(row.get(k) == v for k, v in where.items())]
        if len(found) == 1:
            return found[0]
        asked = ", ".join(f"{k}={v!r}" for k, v in where.items()) or "no condition"
        if not found:
            there = "; ".join(f"{k}: {list(dict.fromkeys(r.get(k) for r in self.rows))}" for k in where)
            raise InputError(f"no row has {asked}. There are {there[:600]}")
        differ = [k for k in known if len({repr(row.get(k)) for row in found}) == len(found)]
        apart = ", ".join(differ[:4]) or known
        raise InputError(f"{len(found)} rows have {asked}. Add a column that tells them apart, such as {apart}")
