"""Memory of a large result is used again only once nothing refers to the result."""

from __future__ import annotations

import gc

import torch

from probelens.kernels import pages

SHAPE = (5, 1 << 20)


def test_pages_serve_again_once_no_view_of_them_is_left() -> None:
    like = torch.zeros(1)
    first = pages.empty(like, SHAPE)
    first.fill_(1)
    view, where = first[2:3].numpy(), first.data_ptr()
    del first
    gc.collect()
    second = pages.empty(like, SHAPE)
    second.fill_(2)
    assert second.data_ptr() != where
    assert (view == 1).all(), "a view still reads what it was given"
    del view
    gc.collect()
    third = pages.empty(like, SHAPE)
    assert third.data_ptr() == where
    assert (third.shape, third.dtype, third.is_contiguous()) == (SHAPE, torch.float32, True)
    third.fill_(3)
    assert (second == 2).all()


def test_no_more_is_kept_than_allowed() -> None:
    like = torch.zeros(1, dtype=torch.float64)
    held = [pages.empty(like, (1 << 24,)) for _ in range(5)]
    del held
    gc.collect()
    assert sum(size * len(found) for size, found in pages._FREED.items()) <= pages._MOST
    pages._FREED.clear()
