"""The buffer of rows that are not balanced yet."""

from __future__ import annotations

import numpy as np

from hemiola.order.buffer import NUMBERS, Buffer


def add(buffer: Buffer, value: float, epoch: int, worker: int, number: int, rows: int = 1) -> None:
    block = np.full((rows, NUMBERS // 2), value, np.float32)
    buffer.prepare(block.shape[1], block.dtype)
    buffer.add(block, epoch, worker, step=0, number=number, lean=0.0)


def pairs(buffer: Buffer) -> list[tuple[int, int, int, int, int]]:
    """(epoch, worker, number, first row, second row) of every item."""
    found = []
    for epoch, items in buffer.contents().items():
        columns = (items.worker, items.number, items.first, items.second)
        found += [(epoch, *map(int, each)) for each in zip(*columns, strict=True)]
    return found


def test_units_of_a_worker_pair_up_whatever_comes_between_them() -> None:
    buffer = Buffer(workers=2, paired=True)
    add(buffer, 1, epoch=0, worker=0, number=0)
    add(buffer, 2, epoch=0, worker=1, number=4)
    add(buffer, 3, epoch=0, worker=1, number=5)
    add(buffer, 4, epoch=0, worker=0, number=1)
    assert pairs(buffer) == [(0, 1, 2, 1, 2), (0, 0, 0, 0, 3)]


def test_a_row_waits_for_its_mate_as_long_as_its_book_is_open() -> None:
    buffer = Buffer(workers=2, paired=True)
    add(buffer, 1, epoch=0, worker=0, number=2)
    add(buffer, 2, epoch=0, worker=1, number=0)
    buffer.clear(buffer.contents(), {(0, 1)})
    assert buffer.rows[:, 0].tolist() == [2]
    assert not buffer.has_news
    add(buffer, 3, epoch=0, worker=1, number=1)
    assert buffer.has_news
    assert pairs(buffer) == [(0, 1, 0, 0, 1)]


def test_there_is_always_room_for_what_rows_wait_for() -> None:
    buffer = Buffer(workers=1, paired=True)
    add(buffer, 0, epoch=0, worker=0, number=0)
    for epoch in range(1, 1 + buffer.space):
        add(buffer, epoch, epoch, worker=0, number=0)
    assert buffer.space == 0
    full = len(buffer.rows)
    buffer.clear(buffer.contents(), {(epoch, 0) for epoch in range(full)})
    assert buffer.space > 0
    again = Buffer(workers=1, paired=True)
    again.load_state_dict(buffer.state_dict())
    assert again.space > 0
    for each in (buffer, again):
        assert each.rows[:, 0].tolist() == list(range(full))
        add(each, 9, epoch=1, worker=0, number=1)
        assert pairs(each) == [(1, 0, 0, 1, full)]
