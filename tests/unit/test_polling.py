"""What becomes of a request that fails."""

import gc
import weakref

import pytest

from kaitian_mpi.runtime.polling import wait_request


class Failing:
    def Test(self):  # noqa: N802, MPI's name
        raise RuntimeError("a rank is lost")


def test_a_failed_request_is_kept_for_mpi_may_write_to_its_buffers():
    request = Failing()
    found = weakref.ref(request)
    with pytest.raises(RuntimeError, match="a rank is lost"):
        wait_request(request)
    del request
    gc.collect()
    assert found() is not None
