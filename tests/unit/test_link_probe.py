"""Finding the rank with slow links from the times of a ring's links."""

import pytest

from kaitian_mpi.train.rebalancing import end_with_slow_links


@pytest.mark.parametrize(
    ("links", "expected"),
    [
        ([1.0, 1.0, 1.0, 1.0], None),
        ([1.0, 5.0, 5.0, 1.0], 2),
        ([5.0, 1.0, 1.0, 5.0], 0),
        ([1.0, 9.0, 1.0, 1.0], None),  # one slow cable is neither end's fault
        ([1.0, 8.0, 8.0], 2),
    ],
)
def test_a_rank_is_named_only_if_both_its_links_are_slow(links, expected):
    found = end_with_slow_links(links)
    assert (found and found[0]) == expected
    if found:
        assert found[1] >= 2
