"""Probes of activations in a mapped file: equal to those in memory, one reading, and about one site in memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import probelens as pl
from probelens.bench.harness import PeakMemory
from probelens.numerics.mapped import Mapped, gather
from probelens.probing.solvers.factor import Factorised
from probelens.running.stream import Stream


def streamed(folder: Path, n: int, pos: int, d: int, sites: int = 1) -> tuple[dict[str, Tensor], Tensor]:
    """Sites in files, mapped as ``collect`` maps them, and two classes that can be read there."""
    g = torch.Generator().manual_seed(0)
    y = torch.randint(0, 2, (n, pos), generator=g)
    stream = Stream(folder, n, "key")
    with stream.writing():
        for start in range(0, n, 50):
            part = y[start : start + 50]
            stream.put(
                start, {f"site_{i}": torch.randn(*part.shape, d, generator=g) + part[..., None] for i in range(sites)}
            )
    return stream.tensors(), y


def resident(x: Tensor) -> int | None:
    """Bytes of a mapping that count as the process's memory, by the kernel's own list."""
    inside, address = False, x.data_ptr()
    try:
        lines = Path("/proc/self/smaps").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            start, stop = (int(word, 16) for word in words[0].split("-"))
            inside = start <= address < stop
        elif inside and words[0] == "Rss:":
            return int(words[1]) * 1024
    return None


def test_probes_of_mapped_activations_equal_those_in_memory(tmp_path: Path) -> None:
    mapped, y = streamed(tmp_path, 120, 5, 8)
    labels = {"class": y, "number": y.double() + torch.arange(5)}
    mask = torch.rand(120, 5, generator=torch.Generator().manual_seed(1)) > 0.3
    found = [pl.probe(x, labels, mask=mask, max_rows=100) for x in (mapped, {"site_0": mapped["site_0"].clone()})]
    assert found[0].rows == found[1].rows
    assert found[0].rows[0]["n_train"] == 100
    assert found[0].rows[0]["accuracy"] > 0.8
    assert all(torch.equal(found[0].coefs[key], found[1].coefs[key]) for key in found[0].coefs)


def test_gathered_rows_are_those_of_the_masks_in_order(tmp_path: Path) -> None:
    x, _ = streamed(tmp_path, 70, 40, 512)  # several chunks
    x = x["site_0"]
    masks = [torch.rand(70, 40, generator=torch.Generator().manual_seed(i)) > 0.5 for i in range(2)]
    for mask, rows in zip(masks, gather(x, masks, torch.float64, less=torch.ones(512)), strict=True):
        assert torch.equal(rows, (x[mask] - 1).double())


def test_what_is_not_finite_in_a_file_is_refused_where_labels_count(tmp_path: Path) -> None:
    mapped, y = streamed(tmp_path, 60, 4, 6)
    mask = torch.ones(60, 4, dtype=torch.bool)
    mask[7] = False
    held = np.load(tmp_path / "site_000.npy", mmap_mode="r+")
    held[7, 1, 2] = np.nan
    assert pl.probe(mapped, y, mask=mask).accuracy("site_0") > 0.5
    held[9, 1, 2] = np.inf
    with pytest.raises(pl.InputError, match="'site_0' have NaN or infinite"):
        pl.probe(mapped, y, mask=mask)


def test_pages_that_were_read_are_given_back_and_what_was_changed_in_memory_stays(tmp_path: Path) -> None:
    mapped, y = streamed(tmp_path, 200, 10, 512)
    x = mapped["site_0"]
    if resident(x) is None or Mapped.of(x) is None:
        pytest.skip("the system doesn't list its mappings")
    x.sum()
    assert resident(x) == pytest.approx(x.nbytes, rel=0.01)
    pl.probe(mapped, y, Cs=[1e-4])
    assert resident(x) < 0.1 * x.nbytes
    x[:, :, 0] = 7.0  # in memory only
    pl.probe(mapped, y, Cs=[1e-4])
    assert bool((x[:, :, 0] == 7).all())


def test_probing_a_stream_takes_little_more_memory_than_one_site(tmp_path: Path) -> None:
    mapped, y = streamed(tmp_path, 400, 250, 192, sites=3)
    site = mapped["site_0"].nbytes
    pl.probe({"few": mapped["site_0"][:40].clone()}, y[:40], Cs=[1e-4])  # loads what is loaded once
    with PeakMemory() as peak:
        pl.probe(mapped, y, Cs=[1e-4])
    if peak.growth is None:
        pytest.skip("the system doesn't tell the peak of memory")
    assert peak.growth < 3 * site  # 1.2 to 1.8 measured; 7.7 with copies of every step and all sites mapped


def test_features_made_in_place_are_the_same() -> None:
    x = torch.randn(80, 5, generator=torch.Generator().manual_seed(0)) + 3
    copied = Factorised.of(x, standardize=True)
    given = x.clone()
    made = Factorised.of(given, standardize=True, overwrite=True)
    assert made.x.data_ptr() == given.data_ptr()
    assert torch.equal(made.x, copied.x)
    assert torch.equal(made.values, copied.values)
    assert torch.allclose(made.at(torch.float64), copied.at(torch.float64), atol=1e-6)
    # Where the fit has another dtype, or isn't centred, the features stay as they were.
    for kwargs in ({"dtype": torch.float64}, {"fit_intercept": False}):
        given = x.clone()
        Factorised.of(given, standardize=True, overwrite=True, **kwargs)
        assert torch.equal(given, x)
