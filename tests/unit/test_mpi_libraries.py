"""What differs between Open MPI and MPICH."""

import socket

import pytest

from kaitian_mpi.runtime.launcher import Launch, prepare_environment
from kaitian_mpi.runtime.mpi_libraries import (
    MPICH,
    OPEN_MPI,
    launched_by,
    report_to_launcher,
    survival_advice,
    survival_requested,
)

RANKS = {
    OPEN_MPI: dict.fromkeys(OPEN_MPI.rank_variables, "1"),
    MPICH: dict.fromkeys(MPICH.rank_variables, "1"),
}


@pytest.mark.parametrize("library", [OPEN_MPI, MPICH])
def test_a_launcher_is_known_by_the_variables_of_its_ranks(library):
    assert launched_by(RANKS[library]) is library
    assert launched_by({}) is None
    assert launched_by({**RANKS[OPEN_MPI], **RANKS[MPICH]}) is OPEN_MPI
    for name in library.rank_variables:
        assert launched_by({**RANKS[library], name: ""}) is None


def test_a_job_under_mpich_has_no_fault_tolerance_whatever_the_environment_says():
    asked = {"OMPI_MCA_mpi_ft_enable": "1"}
    assert survival_requested({**asked, **RANKS[OPEN_MPI]})
    assert survival_requested(asked)
    assert not survival_requested({**asked, **RANKS[MPICH]})
    assert not survival_requested(RANKS[OPEN_MPI])
    assert survival_advice("Open MPI 5.0.11").startswith("give mpirun --with-ft ulfm")
    for library in ("Open MPI 4.1.4", "MPICH 5.0.2", "Intel MPI 2021.13"):
        advice = f"{library} cannot survive it; kaitian-supervise starts the job again"
        assert survival_advice(library).startswith(advice)
    environ = dict(RANKS[MPICH])  # which library will be loaded is not known yet
    prepare_environment(environ, Launch(0, 4, 0, 4), 2)
    assert environ["OMPI_MCA_btl"] == "^tcp"


def test_nothing_is_written_to_a_file_that_is_not_the_launchers(tmp_path):
    ours, theirs = socket.socketpair()
    with ours, theirs, (tmp_path / "file").open("w+b") as file:
        theirs.setblocking(False)
        for number in (ours.fileno(), file.fileno(), 9999):
            report_to_launcher({**RANKS[MPICH], "PMI_FD": str(number)})
        with pytest.raises(BlockingIOError):
            theirs.recv(1)
        assert (tmp_path / "file").read_bytes() == b""
