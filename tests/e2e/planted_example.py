"""Runs an example whose benchmark takes a second, where it would take up to ten.

python planted_example.py EXAMPLE ARGUMENT...
"""

import functools
import runpy
import sys

import kaitian_mpi

kaitian_mpi.Training = functools.partial(kaitian_mpi.Training, benchmark_seconds=1.0)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
