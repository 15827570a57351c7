"""The row layout: the worked example, and a comparison with the table in plain Python."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from peagle.row_layout import draft_rows

M = 999


def test_worked_example() -> None:
    rows = draft_rows(
        ids=torch.tensor([10, 11, 12, 13]),
        starts=torch.tensor([0, 4]),
        first=torch.tensor([5]),
        rejected=torch.tensor([1]),
        next_ids=torch.tensor([100]),
        k=3,
        mask_id=M,
    )
    assert rows.ids.tolist() == [11, 12, 100, M, M]
    assert rows.positions.tolist() == [5, 6, 7, 8, 9]
    assert rows.source.tolist() == [0, 1, 2, -1, -1]
    assert rows.sampled.tolist() == [[2, 3, 4]]
    assert rows.num_real == 3


def table(
    ids: list[int], first: int, rejected: int, newest: int, k: int
) -> list[tuple[int, int, int]]:
    """(id, position, index of the hidden state) of each row, computed in plain Python."""
    accepted = ids[: len(ids) - rejected]
    count = len(accepted)
    rows = [(accepted[j + 1] if j + 1 < count else newest, first + j, j) for j in range(count)]
    return rows + [(M, first + count + i, -1) for i in range(k - 1)]


REQUEST = st.integers(1, 9).flatmap(
    lambda n: st.tuples(
        st.lists(st.integers(0, 500), min_size=n, max_size=n),
        st.integers(0, 50),
        st.integers(0, n - 1),
        st.integers(0, 9),
    )
)


@given(st.lists(REQUEST, min_size=1, max_size=5), st.integers(1, 11))
def test_ragged_batch_equals_the_table(
    batch: list[tuple[list[int], int, int, int]], k: int
) -> None:
    ids, first, rejected, newest = (list(column) for column in zip(*batch, strict=True))
    starts = torch.tensor([0] + [len(i) for i in ids]).cumsum(0)
    flat = torch.tensor([token for i in ids for token in i])
    rows = draft_rows(
        flat, starts, torch.tensor(first), torch.tensor(rejected), torch.tensor(newest), k, M
    )
    for b, request in enumerate(batch):
        own = slice(int(rows.starts[b]), int(rows.starts[b + 1]))
        source = rows.source[own]
        local = torch.where(source < 0, -1, source - starts[b])
        columns = (rows.ids[own].tolist(), rows.positions[own].tolist(), local.tolist())
        assert list(zip(*columns, strict=True)) == table(*request, k)
        last = len(request[0]) - request[2] - 1  # the row of the newest token
        assert rows.sampled[b].tolist() == [int(rows.starts[b]) + last + i for i in range(k)]


@given(REQUEST, st.integers(1, 11))
def test_a_step_costs_at_most_two_k_rows(request_: tuple[list[int], int, int, int], k: int) -> None:
    ids, first, rejected, newest = request_
    ids = ids[: k + 1]
    rejected = min(rejected, len(ids) - 1)
    rows = draft_rows(
        ids=torch.tensor(ids),
        starts=torch.tensor([0, len(ids)]),
        first=torch.tensor([first]),
        rejected=torch.tensor([rejected]),
        next_ids=torch.tensor([newest]),
        k=k,
        mask_id=M,
    )
    assert len(rows.ids) <= 2 * k
    assert rows.positions.tolist() == list(range(first, first + len(rows.ids)))
