"""The paper's claims about formal models and ours: paper, ours, agrees."""

from __future__ import annotations

import pandas as pd

from probelens.examples.refit_the_probe.formal.claims_reading import READING
from probelens.examples.refit_the_probe.formal.claims_using import UNDER_MEANS, USING
from probelens.examples.refit_the_probe.formal.rows import Missing
from probelens.results.report import Claim

NEEDED = {"span", "length", "accuracy", "how", "drop", "lo", "hi", "verdict", "com", "n_params", "what", "label"}


def claims(rows: pd.DataFrame) -> list[Claim]:
    """The claims about formal models, in the paper's order.

    Args:
        rows: Rows of the run, of any of its cells.

    Returns:
        A row for each claim, also where the cells that it needs are missing. Claims are about the probe's rows, as the
        paper's are; those about directions are judged of the class means as well, in runs that ablated them.
    """
    made: list[Claim] = []
    # A run without rows of one kind may lack their columns.
    rows = rows.reindex(columns=[*rows.columns, *sorted(NEEDED - set(rows.columns))])
    means = rows["what"].isin(("mean_direction", "means")).any()
    for check in (*READING, *USING, *(UNDER_MEANS if means else ())):
        try:
            made.append(check(rows))
        except Missing as err:
            made.append(err.claim)
    return made
