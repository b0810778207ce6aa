import pytest

from kaitian_mpi.devices import known_kinds
from kaitian_mpi.devices.choice import Choice, assign_devices, choose_device
from kaitian_mpi.errors import AgreedError, UserError
from kaitian_mpi.mpi.topology import RankInfo, check_own_devices, shared_devices

TWO_GPUS = {"cuda": 2, "cpu": 8}
NO_GPU = {"cuda": 0, "cpu": 8}


def test_choose_device():
    for devices, counts, local_rank, local_size, expected in (
        ("auto", NO_GPU, 3, 4, Choice("cpu", 3)),
        ("auto", TWO_GPUS, 1, 2, Choice("cuda", 1)),
        ("cpu", TWO_GPUS, 5, 9, Choice("cpu", 5)),
        ("cuda:1,cuda:0,cpu", TWO_GPUS, 0, 3, Choice("cuda", 1)),
        ("cuda:1,cuda:0,cpu", TWO_GPUS, 2, 3, Choice("cpu", 0)),
        ("cuda,cpu,cpu", TWO_GPUS, 0, 2, Choice("cuda", 0)),
        ("cuda:0,rocm:0", TWO_GPUS, 0, 2, Choice("cuda", 0)),  # of another build of torch
    ):
        assert choose_device(devices, counts, local_rank, local_size, "h") == expected


def test_an_unavailable_device_is_an_error():
    for devices, counts, local_size, message in (
        ("auto", TWO_GPUS, 3, r"3 ranks on h, but h has 2 cuda; .* cuda:0,cuda:1,cpu"),
        ("cuda:0", NO_GPU, 1, r"asks for cuda:0, but h has no accelerator"),
        ("cuda:5", TWO_GPUS, 1, r"asks for cuda:5, but h has 2 cuda"),
        ("cuda:0,cuda:1", TWO_GPUS, 4, r"is too short for the 4 ranks on h; list a device"),
        ("tpu:0", TWO_GPUS, 1, r"'tpu:0' is not a device; give auto"),
        ("cuda:x", TWO_GPUS, 1, r"'cuda:x' is not a device; give auto"),
    ):
        with pytest.raises(UserError, match=message):
            choose_device(devices, counts, 0, local_size, "h")


A, B, C = {"cuda": ["A"]}, {"cuda": ["B"]}, {"cuda": ["A", "B", "C"]}
MIXED = {"cuda": ["A"], "xpu": ["A"]}  # two kinds may identify devices alike


@pytest.mark.parametrize(
    ("inventories", "expected"),
    [
        ([MIXED, MIXED], ["cuda:0", "xpu:0"]),
        ([A, {"xpu": ["X"]}], ["cuda:0", "xpu:0"]),  # two builds of torch
        ([A, B], ["cuda:0", "cuda:0"]),  # CUDA_VISIBLE_DEVICES differs
        ([C, C, C], ["cuda:0", "cuda:1", "cuda:2"]),
        ([C, A], ["cuda:1", "cuda:0"]),  # only the first has another
        ([C, {"cuda": ["C", "B"]}, A], ["cuda:1", "cuda:0", "cuda:0"]),
        (
            [{"cuda": ["A", "B"]}, {"cuda": ["B", "C"]}, {"cuda": ["A", "B"]}],
            ["cuda:0", "cuda:1", "cuda:1"],
        ),
        ([A, {}, {"cuda": []}], ["cuda:0", None, None]),
        ([{}, {}], [None, None]),
    ],
)
def test_auto_gives_each_rank_a_device_of_its_own(inventories, expected):
    assert named(assign_devices(inventories, "h")) == expected
    counts = {"cuda": 1, "cpu": 1}
    for rank, choice in enumerate(assign_devices(inventories, "h")):
        chosen = choose_device("auto", counts, rank, 9, "h", inventories=inventories)
        assert chosen == (choice or Choice("cpu", rank))


def named(choices):
    return [choice and f"{choice.kind}:{choice.index}" for choice in choices]


@pytest.mark.parametrize(
    ("inventories", "message", "shared"),
    [
        ([A, A], r"2 ranks on h, but h has 1 cuda; start 1 ranks .* cuda:0,cpu,", ["cuda:0"] * 2),
        (
            [MIXED] * 3,
            r"3 ranks on h, but h has 1 cuda, 1 xpu; start 2 .* --devices cuda:0,xpu:0,cpu, or let "
            r"ranks share a device with --share-device",
            ["cuda:0", "xpu:0", "cuda:0"],
        ),
        ([A, B, A], r"3 ranks on h, but h has 2 cuda; start 2", ["cuda:0"] * 3),
        ([MIXED] * 5, r"5 ranks on h", [*["cuda:0", "xpu:0"] * 2, "cuda:0"]),
    ],
)
def test_more_ranks_than_devices_is_an_error_unless_they_share(inventories, message, shared):
    with pytest.raises(UserError, match=message):
        assign_devices(inventories, "h")
    assert named(assign_devices(inventories, "h", share=True)) == shared


def test_ranks_of_a_group_with_one_device_are_found():
    def info(rank, kind, device, library="NCCL"):
        fields = (rank, rank, "h", kind, "cuda:0", "a GPU", 0, "2.13")
        return RankInfo(*fields, physical_device=device, library=library)

    def sharing(*infos):
        return [[each.world_rank for each in some] for some in shared_devices(infos)]

    for first, second in (
        (("cuda", "0/A"), ("cuda", "0/B")),
        (("cuda", "0/A"), ("cuda", "8/A")),  # another node's
        (("cuda", "0/A"), ("mlu", "0/A")),  # another group
        (("mps", "0/A", ""), ("mps", "0/A", "")),  # no library
        (("cpu", "", ""), ("cpu", "", "")),
    ):
        assert sharing(info(0, *first), info(1, *second)) == []
    assert sharing(*(info(n, "cuda", f"0/{n % 2}") for n in range(4))) == [[0, 2], [1, 3]]
    with pytest.raises(AgreedError, match=r"share one device \(A\), which"):
        check_own_devices([info(rank, "cuda", "0/A") for rank in range(2)])


@pytest.mark.parametrize("kind", known_kinds().devices)
def test_every_kind_satisfies_the_protocol(kind):
    device = known_kinds().devices[kind]
    assert device.kind == kind
    assert device.torch_device(0).type in (kind, "cuda")
    if device.count():
        device.select(0)
        device.synchronize(0)
        assert device.name(0)
        assert device.memory_bytes(0) > 1 << 20
        device.restart_memory_peak(0)
        assert device.memory_peak_bytes(0) >= 0
        assert 0 < device.memory_limit_bytes(0, 2) <= device.memory_limit_bytes(0, 1)
        device.release_cached_memory()
        earlier, later = device.mark(), device.mark()
        later.wait()
        assert later.is_reached()
        assert later.seconds_since(earlier) >= 0
        state = device.random_state(0)
        assert (state is None) == device.is_host
        if state is not None:
            device.set_random_state(0, state)
