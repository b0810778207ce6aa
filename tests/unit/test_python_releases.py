"""What ranks with another release of Python pickle, and how they round."""

import pickle
import platform
import sys
from pathlib import Path, PurePosixPath
from unittest.mock import patch

import pytest

from kaitian_mpi.distributed.python_releases import accept_pickled_paths
from kaitian_mpi.train.evaluation import _means

# Of Python 3.13.0: pickle.dumps([Path("/a"), PurePosixPath("b")])
PICKLED = (
    b"\x80\x04\x95I\x00\x00\x00\x00\x00\x00\x00]\x94(\x8c\x0epathlib._local\x94\x8c\tPosixPath\x94"
    b"\x93\x94\x8c\x02/a\x94\x85\x94R\x94h\x01\x8c\rPurePosixPath\x94\x93\x94\x8c\x01b\x94\x85\x94R"
    b"\x94e."
)
OWN = platform.python_version()


@pytest.fixture(autouse=True)
def _modules_as_before():
    with patch.dict(sys.modules):
        yield


def test_paths_of_python_3_13_are_accepted():
    accept_pickled_paths([OWN, "3.13.0"])
    assert pickle.loads(PICKLED) == [Path("/a"), PurePosixPath("b")]


@pytest.mark.parametrize("other", [OWN, "3.12.1", "3.14.0", "3.130.0"])
def test_nothing_changes_with_other_releases(other):
    before = dict(sys.modules)
    accept_pickled_paths([OWN, other])
    assert sys.modules == before


def test_results_of_evaluations_are_rounded_alike():
    """The builtin sum would return 1.0 from Python 3.12 on, and 0.0 before."""
    by_rank = [{"error": (total, count)} for total, count in ((1e16, 2), (1.0, 0.5), (-1e16, 1.5))]
    assert _means(by_rank) == {"error": 0.0}
