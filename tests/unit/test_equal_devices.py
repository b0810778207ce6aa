"""Equal devices are equally fast until repeated rounds separate them."""

import statistics

import pytest

from kaitian_mpi.mpi.topology import RankInfo
from kaitian_mpi.train.measure.equal_devices import are_equal_cpus, share_measurements
from kaitian_mpi.train.measure.rank_timer import RankMeasurement

SAMPLES = 64


def rank(number, **changed):
    usual = {
        **{"world_rank": number, "local_rank": number, "host": "node", "kind": "cpu"},
        **{"device": "cpu", "device_name": "cpu  Xeon", "memory_bytes": 1, "torch_version": "2"},
    }
    return RankInfo(**{**usual, **changed})


def timed(*seconds, largest=SAMPLES, limit=None, **changed):
    """Return what a rank has measured whose step with its largest batch took these seconds."""
    rounds = [[sec / 8 for sec in seconds], [*seconds]]
    usual = {"memory_format": "contiguous", "precision": "fp32"}
    return RankMeasurement(
        [largest // 8, largest],
        [statistics.median(each) for each in rounds],
        limit,
        rounds=rounds,
        **{**usual, **changed},
    )


def seconds_of(results, infos=None, threads=None):
    infos = infos or [rank(number) for number in range(len(results))]
    shared = share_measurements(infos, threads or [1] * len(infos), results, SAMPLES)
    return [result.cost.seconds(SAMPLES) for result in shared]


def test_ranks_that_shared_cores_at_unlike_moments_are_equal():
    """As four equal ranks on two cores were measured, which gave them 26, 26, 39 and 37 rows."""
    found = seconds_of([timed(1.5), timed(1.5), timed(1.0), timed(1.05)])
    assert found == pytest.approx([(1.05 + 1.5) / 2] * 4)
    once = [timed(1.5), timed(1.0, 1.0, 1.0, 1.0)]
    assert len(set(seconds_of(once))) == 1, "a single round separates nothing"
    overlapping = [timed(1.0, 1.6, 1.1), timed(1.5, 1.7, 1.5)]
    assert len(set(seconds_of(overlapping))) == 1


def test_repeated_rounds_separate_devices():
    slow = [timed(1.0, 1.1, 1.0), timed(2.0, 2.1, 2.2), timed(1.05, 1.0, 1.1)]
    fast, slower, other = seconds_of(slow)
    assert fast == other == pytest.approx(1.025)
    assert slower == pytest.approx(2.1)
    twice = [timed(1.0, 1.0), timed(1.5, 1.5)]
    assert len(set(seconds_of(twice))) == 1, "too few rounds on cores that others use as well"
    gpus = [rank(n, kind="cuda", device=f"cuda:{n}", device_name="cuda  H100") for n in range(2)]
    assert seconds_of(twice, gpus) == pytest.approx([1.0, 1.5])
    assert len(set(seconds_of([timed(1.0, 1.0), timed(1.02, 1.02)], gpus))) == 1


@pytest.mark.parametrize(
    "changed",
    [
        *({"host": "other"}, {"node": 1}, {"device_name": "cpu  Atom"}, {"slowdown": "3x"}),
        *({"kind": "mlu"}, {"cpu_capability": "AVX2"}, {"torch_version": "1"}),
    ],
    ids=str,
)
def test_devices_that_may_be_unlike_keep_what_they_measured(changed):
    infos = [rank(0), rank(1, **changed)]
    assert seconds_of([timed(1.0), timed(3.0)], infos) == pytest.approx([1.0, 3.0])


def test_cpu_ranks_of_one_host_are_equal():
    infos = [rank(0), rank(1)]
    assert are_equal_cpus(infos, [1, 1])
    assert not are_equal_cpus(infos, [1, 2])
    assert not are_equal_cpus([rank(0), rank(1, slowdown="3x")], [1, 1])
    assert not are_equal_cpus([rank(n, kind="cuda", device=f"cuda:{n}") for n in (0, 1)], [1, 1])


def test_ranks_with_unlike_threads_keep_what_they_measured():
    assert seconds_of([timed(1.0), timed(3.0)], threads=[4, 1]) == pytest.approx([1.0, 3.0])


def test_what_is_shared_is_of_the_settings_that_most_chose_and_memory_is_each_ranks_own():
    results = [
        timed(1.0, limit=100),
        timed(9.0, precision="bf16", limit=50),
        timed(2.0, largest=SAMPLES // 2),
    ]
    infos = [rank(number) for number in range(3)]
    shared = share_measurements(infos, [1] * 3, results, SAMPLES)
    assert [result.precision for result in shared] == ["fp32"] * 3
    assert [result.largest_micro_batch for result in shared] == [100, 50, None]
    for result in shared:
        assert result.batches == [4, 8, 32, 64]
        assert result.seconds == [0.25, 0.125, 2.0, 1.0]


def test_the_error_shown_is_that_of_the_repeats():
    assert timed(1.0).repeat_error is None
    assert timed(1.0, 1.2).repeat_error == pytest.approx(0.2 / 2 / 1.1)
    infos = [rank(number) for number in range(2)]
    shared = share_measurements(infos, [1, 1], [timed(1.0), timed(1.2)], SAMPLES)
    assert [result.repeat_error for result in shared] == pytest.approx([0.2 / 2 / 1.1] * 2)
