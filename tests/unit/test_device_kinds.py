"""Each built-in kind against a stand-in for its torch module, with the same interface.

The stand-ins have the functions that the vendors' own sources define, and record what is called.
A vendor's plug-in takes torch's only device type for plug-ins, so each runs in a forked process.
"""

import importlib
import importlib.metadata
import json
import os
import pkgutil
import re
import sys
import traceback
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from choices import by_default
from torch.utils import backend_registration
from vendor.contracts import CONTRACTS

from kaitian_mpi.devices import known_kinds, registry
from kaitian_mpi.devices.choice import choose_device
from kaitian_mpi.devices.plugin import AUTOLOAD, PLUGINS, KindError, import_plugin, import_torch
from kaitian_mpi.devices.vendors import CudaDevice, MusaDevice, NpuDevice, is_on_pci
from kaitian_mpi.distributed import registration
from kaitian_mpi.errors import UserError

PLUG_IN = """
import contextlib, types
import torch
import torch.distributed as dist
TYPE, BACKEND, IS_EXTENDED = {type!r}, {backend!r}, {is_extended!r}
calls, groups = [], []
def recorded(name, value=None):
    def call(*arguments, **options):
        calls.append([name, *[str(each) for each in (*arguments, *options)]])
        return value
    return call
Event = recorded("Event", types.SimpleNamespace(
    record=recorded("record"), query=lambda: True,
    synchronize=recorded("Event.synchronize"), elapsed_time=lambda end: 1500.0,
))
module = types.ModuleType("torch." + TYPE)
vars(module).update(
    Stream=type("Stream", (), {{}}), Event=Event,
    stream=contextlib.nullcontext, current_stream=recorded("current_stream", "stream"),
    device_count=lambda: {count}, is_available=lambda: {count} > 0,
    is_initialized=lambda: True, _is_in_bad_fork=lambda: False, current_device=lambda: 0,
    set_device=recorded("set_device"), synchronize=recorded("synchronize"),
    get_device_name=lambda index: "Stand-in 9000",
    get_device_properties=lambda index: types.SimpleNamespace(
        total_memory=1 << 33, **{properties!r}
    ),
    mem_get_info=recorded("mem_get_info", (1 << 32, 1 << 33)),
    memory_reserved=recorded("memory_reserved", 1 << 20),
    reset_peak_memory_stats=recorded("reset_peak_memory_stats"),
    max_memory_reserved=recorded("max_memory_reserved", 1 << 21),
    empty_cache=recorded("empty_cache"),
    get_rng_state=recorded("get_rng_state", torch.arange(4)),
    set_rng_state=recorded("set_rng_state"),
)
if TYPE == "acme":
    torch.utils.backend_registration._setup_privateuseone_for_python_backend(TYPE, module)
else:
    torch.utils.rename_privateuse1_backend(TYPE)
    torch._register_device_module(TYPE, module)
def extended(options, _):
    return plain(options.store, options.group_rank, options.group_size, options.timeout)
def plain(store, rank, size, timeout):
    groups.append([rank, size, timeout.total_seconds()])
    return "the group"
dist.Backend.register_backend(
    BACKEND, extended if IS_EXTENDED else plain, extended_api=IS_EXTENDED, devices=[TYPE]
)
{extra}
"""
# A plug-in whose module has no more than that of torch's own example, OpenReg, in PyTorch's
# `test/cpp_extensions/open_registration_extension/torch_openreg/torch_openreg/openreg`.
BARE = """
OWN = "device_count is_available is_initialized current_device _is_in_bad_fork get_rng_state"
for name in [name for name in vars(module) if name not in (*OWN.split(), "set_rng_state")]:
    vars(module)["_" + name] = vars(module).pop(name)
"""
BACKENDS = {"npu": ("hccl", True), "mlu": ("cncl", False), "musa": ("mccl", False)}


def write_plugin(folder, kind, count=2, extra="", **properties):
    backend, is_extended = BACKENDS.get(kind, ("acmeccl", False))
    names = {"type": kind, "backend": backend, "is_extended": is_extended, "count": count}
    path = folder / f"{PLUGINS.get(kind, 'torch_acme')}.py"
    path.write_text(PLUG_IN.format(**names, extra=extra, properties=properties))


def write_documented_kind(folder, extra):
    """Write the package that the documentation shows, its entry point, and a plug-in for it."""
    write_plugin(folder, "acme", extra=extra)
    text = (Path(__file__).parents[2] / "docs" / "new-device.md").read_text()
    (code,) = re.findall(r'```python\n("""kaitian_acme.py.*?)```', text, re.DOTALL)
    ((group, name, value),) = re.findall(r'entry-points."(.*devices)"\]\n(\w+) = "(.*)"\n', text)
    (folder / "kaitian_acme.py").write_text(code)
    (folder / "kaitian_acme-1.0.dist-info").mkdir()
    points = folder / "kaitian_acme-1.0.dist-info/entry_points.txt"
    points.write_text(f"[{group}]\n{name} = {value}\n")


def forked(call, *path):
    """Return what `call` returns in a forked process that finds packages in these folders."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            sys.path[:0] = [str(folder) for folder in path]
            sys.dont_write_bytecode = True  # a plug-in may be written anew within a second
            known_kinds.cache_clear()
            registry._device_of_type.cache_clear()
            text = json.dumps(call())
        except BaseException:
            text = json.dumps({"failed": traceback.format_exc()})
        os.write(writer, text.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        result = json.loads(pipe.read())
    os.waitpid(child, 0)
    assert not (isinstance(result, dict) and "failed" in result), result["failed"]
    return result


def use_everything(kind):
    """Use each method of a plug-in's kind; return the plug-in's records."""
    if is_acme := kind == "acme":  # whose class does not import it
        importlib.import_module("torch_acme")
    kinds = known_kinds()
    device, plugin = kinds.devices[kind], sys.modules[PLUGINS.get(kind, "torch_acme")]
    device.select(1)
    device.synchronize(1)
    earlier, later = device.mark(), device.mark()
    later.wait()
    assert (later.is_reached(), later.seconds_since(earlier)) == (True, 1.5)
    assert (device.kind, kinds.counts[kind], str(device.torch_device(1))) == (kind, 2, f"{kind}:1")
    assert registry.device_of(torch.device(kind, 0)).kind == kind
    assert device.name(1) == "Stand-in 9000"
    assert device.memory_bytes(1) == 1 << 33
    assert device.memory_limit_bytes(1, 2) == (1 << 20) + (1 << 31)
    assert kinds.accelerators()[kind] == (("#0", "#1") if is_acme else ("#4", "#6"))
    assert device.random_state(1).tolist() == [0, 1, 2, 3]
    assert all(hasattr(device.streams(), name) for name in ("Stream", "Event", "stream"))
    group = device.create_vendor_group(dist.HashStore(), 1, 2, timedelta(seconds=7))
    assert (group, plugin.groups) == ("the group", [[1, 2, 7.0]])
    assert device.is_out_of_memory(RuntimeError(f"{kind.upper()} out of memory."))
    dist.Backend.default_device_backend_map["cpu"] = "fake"  # as torch's own for tests does
    before = dict(dist.Backend.default_device_backend_map)
    for _ in range(2):  # again: the plug-in was imported after torch
        registration.register()
    assert dist.Backend.backend_list.count("kaitian") == 1
    assert dist.Backend.default_device_backend_map == before
    assert dist.Backend.backend_capability["kaitian"] == ["cpu", kind]
    device.restart_memory_peak(1)
    assert device.memory_peak_bytes(1) == 1 << 21
    device.release_cached_memory()
    device.set_random_state(1, torch.arange(2))
    return plugin.calls


HAS_PYTHON_DEVICES = pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch cannot have a device type in Python",
)


@pytest.mark.parametrize("kind", [*BACKENDS, pytest.param("acme", marks=HAS_PYTHON_DEVICES)])
def test_a_kind_uses_its_vendors_plug_in(kind, tmp_path, monkeypatch):
    for name in ("ASCEND_RT_VISIBLE_DEVICES", "MLU_VISIBLE_DEVICES", "MUSA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "4,6")
    if kind == "acme":
        write_documented_kind(tmp_path, "")
    else:
        write_plugin(tmp_path, kind)
    calls = forked(lambda: use_everything(kind), tmp_path)
    of_one = "set_device synchronize mem_get_info reset_peak_memory_stats max_memory_reserved"
    for call in (
        *([name, "1"] for name in f"{of_one} get_rng_state".split()),
        *(["Event", "blocking", "enable_timing"], ["Event.synchronize"], ["empty_cache"]),
        ["set_rng_state", "tensor([0, 1])", "1"],
    ):
        assert call in calls


def test_a_uuid_identifies_a_device_whatever_its_index(tmp_path, monkeypatch):
    for uuid, visible, ids in (
        ("1234-abcd", "5", ["1234-abcd"]),
        ("0000-0000", "5", ["#5"]),  # torch_npu's, where CANN has none
        ("1234-abcd", "", ["1234-abcd#0", "1234-abcd#1"]),  # two tiles of one board
    ):
        monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", visible)
        write_plugin(tmp_path, "npu", count=len(ids), uuid=uuid)
        assert forked(lambda: known_kinds().accelerators()["npu"], tmp_path) == ids


FAILS = """
def fail():
    raise RuntimeError("aclInit:\\n 507033")
module.device_count = fail
"""


@pytest.mark.parametrize(
    ("text", "count", "extra", "reason"),
    [
        ("raise ImportError('libhccl.so: not found')", 0, "", "ImportError: libhccl.so: not found"),
        ("raise SystemExit('no license')", 0, "", "importing it fails: SystemExit: no license"),
        ("import missing", 0, "", "the package torch_npu is installed, but importing it fails"),
        (None, 0, "", "the package torch_npu supports npu devices, but it finds no device"),
        (None, 2, FAILS, "asking it for devices fails: RuntimeError: aclInit: 507033;"),
    ],
)
def test_a_plug_in_that_cannot_be_used_is_named(text, count, extra, reason, tmp_path, monkeypatch):
    def faults():
        kinds = known_kinds()
        assert "torch_npu" not in sys.modules or text is None
        return [*kinds.devices], dict(kinds.faults)

    monkeypatch.delenv("ASCEND_RT_VISIBLE_DEVICES", raising=False)
    write_plugin(tmp_path, "npu", count=count, extra=extra)
    if text is not None:
        (tmp_path / "torch_npu.py").write_text(text)
    devices, kind_faults = forked(faults, tmp_path)
    assert "npu" not in devices
    assert kind_faults["npu"].startswith("the device kind 'npu' cannot be used: ")
    assert reason in kind_faults["npu"]
    assert "or uninstall" in kind_faults["npu"]
    if count == 0 and text is None:  # hiding the devices is no fault
        monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "")
        devices, kind_faults = forked(faults, tmp_path)
        assert ("npu" in devices, kind_faults) == (True, {})


def test_what_torch_lacks_here_says_what_to_install(monkeypatch):
    known_kinds.cache_clear()
    monkeypatch.setattr(torch.version, "cuda", None)
    kinds = known_kinds()
    known_kinds.cache_clear()
    needed = {kind: f"the package {plugin} in a release that" for kind, plugin in PLUGINS.items()}
    for kind, text in (needed | {"cuda": "a build of torch for them; install it"}).items():
        assert kind not in kinds.devices
        assert PLUGINS.get(kind) not in sys.modules
        with pytest.raises(UserError, match=f"--devices {kind}:0: {kind} devices need {text}"):
            choose_device(f"{kind}:0", kinds.counts, 0, 1, "h", kinds.unusable)


def test_a_plug_in_neither_prints_to_stdout_nor_moves_new_tensors(tmp_path, capfd):
    extra = "print('welcome')\ntorch.set_default_device('meta')"
    (tmp_path / "torch_npu.py").write_text(f"import torch\n{extra}")

    def load():
        for _ in range(2):
            import_plugin("torch_npu")
        return str(torch.zeros(1).device)

    assert forked(load, tmp_path) == "cpu"
    printed = capfd.readouterr()
    assert (printed.out, printed.err.count("welcome")) == ("", 1)


def test_processes_started_later_can_import_torch(tmp_path, monkeypatch):
    """A plug-in leaves torch's variable as it was; one that fails must not break `import torch`."""
    write_plugin(tmp_path, "npu", extra=f"import os\nos.environ[{AUTOLOAD!r}] = '0'")
    for autoload in (None, "0", "1"):
        monkeypatch.delenv(AUTOLOAD, raising=False)
        if autoload is not None:
            monkeypatch.setenv(AUTOLOAD, autoload)
        assert forked(lambda: known_kinds() and os.environ.get(AUTOLOAD), tmp_path) == autoload
    monkeypatch.delenv(AUTOLOAD)
    (tmp_path / "torch_npu.py").write_text("raise OSError('no driver')")
    assert forked(lambda: known_kinds() and os.environ.get(AUTOLOAD), tmp_path) == "0"


@pytest.mark.parametrize("text", ["def load():\n    print('loaded')", "raise OSError('no x')"])
def test_commands_import_torch_without_the_kinds_plug_ins(text, tmp_path, monkeypatch, capfd):
    """A stand-in for torch shows what the import of torch itself would have done."""
    monkeypatch.delenv(AUTOLOAD, raising=False)
    (tmp_path / "torch.py").write_text(f"import os\nassert os.environ[{AUTOLOAD!r}] == '0'")
    (tmp_path / "torch_npu.py").write_text("raise OSError('no driver')")
    (tmp_path / "torch_other.py").write_text(text)
    points = [
        importlib.metadata.EntryPoint(name, f"{name}:load", "torch.backends")
        for name in ("torch_npu", "torch_other")
    ]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: points)

    def load():
        del sys.modules["torch"]
        if "OSError" in text:
            match = (
                r"^torch's plug-in torch_other \(torch_other:load\) cannot be .*: OSError: no x; "
            )
            with pytest.raises(KindError, match=match):
                import_torch()
        else:
            import_torch()
            assert AUTOLOAD not in os.environ
            sys.stdout.flush()

    assert forked(load, tmp_path) is None
    assert capfd.readouterr().out == "loaded\n" * ("loaded" in text)


@pytest.fixture
def devices():
    return {name: pkgutil.resolve_name(path)() for name, path in registry.BUILT_IN.items()}


def test_the_build_of_torch_says_whose_devices_are_called_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    for build, other, library in (("cuda", "rocm", "NCCL"), ("rocm", "cuda", "RCCL")):
        monkeypatch.setattr(torch.version, "cuda", "13.0" if build == "cuda" else None)
        monkeypatch.setattr(torch.version, "hip", "6.4" if build == "rocm" else None)
        known_kinds.cache_clear()
        kinds = known_kinds()
        known_kinds.cache_clear()
        assert (kinds.counts[build], other in kinds.unusable) == (3, True)
        assert kinds.devices[build].torch_device(2) == torch.device("cuda", 2)
        assert kinds.devices[build].library == library


def test_a_build_without_devices_is_named(devices, monkeypatch):
    for kind, tool in (("rocm", "rocminfo"), ("xpu", "sycl-ls")):
        monkeypatch.setattr(f"torch.{devices[kind].torch_type}.device_count", lambda: 0)
        for name in devices[kind].visibility:
            monkeypatch.delenv(name, raising=False)
        with pytest.raises(KindError, match=f"torch's build supports {kind} devices.*{tool}"):
            devices[kind].count()
        monkeypatch.setenv(devices[kind].visibility[0], "")
        assert devices[kind].count() == 0


def test_a_pci_address_identifies_a_device_as_in_nccl(devices, monkeypatch):
    one = SimpleNamespace(pci_bus_id=0x3B, pci_device_id=0, pci_domain_id=0, uuid="GPU-1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: one)
    assert {devices[kind].physical_id(0) for kind in ("cuda", "rocm")} == {"0000:3b:00"}
    del one.pci_bus_id
    assert devices["cuda"].physical_id(0) == "GPU-1"


def test_an_nvidia_gpu_that_torch_cannot_open_is_named(devices, tmp_path, monkeypatch):
    for number, (vendor, device_class) in enumerate([("0x8086", "0x030000"), ("0x10de", "0x0c03")]):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "vendor").write_text(f"{vendor}\n")
        (folder / "class").write_text(f"{device_class}\n")
    assert not is_on_pci("0x10de", "0x03", tmp_path)
    (tmp_path / "1" / "class").write_text("0x030200\n")
    assert is_on_pci("0x10de", "0x03", tmp_path)
    assert not is_on_pci("0x10de", "0x03", tmp_path / "absent")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr("kaitian_mpi.devices.vendors.is_on_pci", lambda *_: True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(KindError, match=r"cannot open the host's NVIDIA GPU.*for CUDA 13\.0"):
        devices["cuda"].count()
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert devices["cuda"].count() == 0


def test_groups_of_torchs_own_backends_are_made_as_torch_makes_them(devices, monkeypatch):
    class Group:
        Options = SimpleNamespace

        def __init__(self, *arguments):
            self.made_of = arguments

    arguments = "the store", 1, 4, timedelta(seconds=9)
    for kind, name in (("xpu", "XCCL"), ("cuda", "NCCL"), ("rocm", "NCCL")):
        place = dist.distributed_c10d, f"ProcessGroup{name}"
        with monkeypatch.context() as context:
            context.setattr(*place, Group, raising=False)
            group = devices[kind].create_vendor_group(*arguments)
            assert group.made_of == (*arguments[:3], SimpleNamespace(_timeout=arguments[3]))
            context.delattr(*place)
            with pytest.raises(KindError, match=f"^this build of torch has no.*'{name.lower()}'"):
                devices[kind].create_vendor_group(*arguments)


def test_a_plug_in_without_a_collective_library_is_named(tmp_path):
    write_plugin(tmp_path, "npu", extra="del dist.Backend._plugins['HCCL']")

    def create():
        npu = known_kinds().devices["npu"]
        fault = r"^torch_npu has no .* 'hccl', so npu devices communicate through host memory"
        assert re.search(fault, npu.missing_library())
        with pytest.raises(KindError, match=fault):
            npu.create_vendor_group(None, 0, 1, None)

    assert forked(create, tmp_path) is None


def test_mps_uses_what_torch_has_for_it(devices, monkeypatch):
    mps, calls = devices["mps"], []

    def record(name, value=None):
        return lambda *arguments, **options: (calls.append([name, *arguments, *options]), value)[1]

    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    values = {"recommended_max_memory": 10_000, "driver_allocated_memory": 4_000}
    values |= {"get_rng_state": "a state"}
    for name in (*values, "synchronize", "empty_cache", "set_rng_state"):
        monkeypatch.setattr(torch.mps, name, record(name, values.get(name)))
    event = SimpleNamespace(record=record("record"))
    monkeypatch.setattr(torch.mps.event, "Event", record("Event", event))
    mps.select(0)
    mps.synchronize(0)
    mps.release_cached_memory()
    mps.restart_memory_peak(0)
    mps.set_random_state(0, mps.random_state(0))
    mps.mark()
    assert calls == [
        *(["synchronize"], ["empty_cache"], ["get_rng_state"], ["set_rng_state", "a state"]),
        *(["Event", "enable_timing"], ["record"]),
    ]
    assert (mps.count(), mps.memory_bytes(0), mps.memory_peak_bytes(0)) == (1, 10_000, 4_000)
    assert mps.memory_limit_bytes(0, 2) == 4_000 + 3_000
    assert (mps.physical_id(0), mps.streams(), mps.vendor_backend) == ("mps", None, None)
    assert not mps.vendor_supports(torch.float32, "SUM")


def test_dtypes_and_reductions_of_libraries_without_a_contract(devices):
    rocm, mlu = (devices[kind].vendor_supports for kind in ("rocm", "mlu"))
    assert rocm(torch.float8_e5m2, None)
    assert mlu(torch.bfloat16, "SUM")
    assert not rocm(torch.bool, "AVG")
    for dtype, reduction in ((torch.float64, "SUM"), (torch.float32, "AVG"), (torch.int32, "BAND")):
        assert not mlu(dtype, reduction)


def test_the_documented_table_is_that_of_the_classes(devices):
    text = (registry.__file__).replace("kaitian_mpi/devices/registry.py", "docs/devices.md")
    with open(text) as file:
        rows = {row.split("|")[1].strip(" `"): row for row in file if row.startswith("| `")}
    assert [kind for kind in rows if kind in devices] == list(devices)
    for kind, device in devices.items():
        assert (device.library or "none") in rows[kind]
        assert not device.plugin or device.plugin in rows[kind]
        assert ("not run on hardware" in rows[kind]) == (not device.run_on_hardware)
        assert PLUGINS.get(kind, "") == device.plugin


@pytest.mark.parametrize("library", CONTRACTS)
def test_each_kind_claims_exactly_what_its_library_does(devices, library):
    """The vendor suite emulates the libraries by these contracts."""
    contract = CONTRACTS[library]
    (kind,) = (device for device in devices.values() if device.library.lower() == library)
    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    reductions = {name.rpartition(".")[2] for name in dist.ReduceOp.RedOpType.__members__}
    for dtype in dtypes:
        assert kind.vendor_supports(dtype, None) == (dtype in contract.moved), dtype
        for reduction in reductions:
            has_it = dtype in contract.reduced and reduction in contract.reductions
            expected = has_it and (reduction, dtype) not in contract.refused
            assert kind.vendor_supports(dtype, reduction) == expected, (dtype, reduction)
    assert kind.vendor_lacks == contract.lacks
    for variable in (contract.handling_variable, contract.polls_store_variable):
        assert not variable or "0" in kind.error_handling()[variable]


@HAS_PYTHON_DEVICES
@pytest.mark.parametrize(
    ("method", "arguments", "name"),
    [
        ("memory_bytes", (1,), "mem_get_info"),
        ("memory_limit_bytes", (1, 2), "memory_reserved"),
        ("memory_peak_bytes", (1,), "max_memory_reserved"),
        *by_default([("synchronize", (1,), "synchronize"), ("select", (1,), "set_device")], ()),
    ],
)
def test_what_a_plug_in_cannot_do_is_named(method, arguments, name, tmp_path):
    write_documented_kind(tmp_path, BARE)

    def call():
        importlib.import_module("torch_acme")
        device = known_kinds().devices["acme"]
        assert device.streams() is None  # so its calls return when the work is done
        assert device.mark().is_reached()
        with pytest.raises(KindError) as caught:
            getattr(device, method)(*arguments)
        return str(caught.value)

    text = forked(call, tmp_path)
    assert text.startswith(f"acme devices: torch.acme has no {name}; install a release of")
    assert text.endswith("or override the methods of AcmeDevice that need it")


def test_a_lost_rank_is_left_to_the_job_and_not_to_torch(monkeypatch):
    """Otherwise torch's watchdogs would end the ranks that survive it."""
    environ = {}
    monkeypatch.setattr(os, "environ", environ)
    for kind, names in {
        CudaDevice: ["TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING"],
        NpuDevice: ["HCCL_ASYNC_ERROR_HANDLING", "TORCH_HCCL_DUMP_ON_TIMEOUT"],
        MusaDevice: ["MCCL_ASYNC_ERROR_HANDLING", "TORCH_MCCL_PROPAGATE_ERROR"],
    }.items():
        assert kind().leave_losses_to_caller() == []
        assert {environ[name] for name in names} == {"0"}
    set_by_user = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2", "TORCH_NCCL_ENABLE_MONITORING": "No"}
    environ |= set_by_user
    assert CudaDevice().leave_losses_to_caller() == []
    assert set_by_user.items() <= environ.items()
    # Else the watchdog sleeps for a minute after an error, and the group's destructor with it.
    assert environ["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"] == "0"
    environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] = "1"
    assert CudaDevice().leave_losses_to_caller() == [
        "TORCH_NCCL_DUMP_ON_TIMEOUT=1 lets torch end or delay the ranks that survive a loss; "
        "unset it"
    ]
    ended = []
    group = SimpleNamespace(abort=lambda: ended.append("abort"), abort_hccl_comm=ended.append)
    CudaDevice().abort_vendor_group(group)
    NpuDevice().abort_vendor_group(group)
    assert ended == ["abort", "the group is not used any more"]


@pytest.mark.parametrize(
    ("variable", "hip", "expected"),
    [
        ("", None, ["expandable_segments:True"]),
        ("PYTORCH_CUDA_ALLOC_CONF", None, []),
        ("PYTORCH_ALLOC_CONF", None, []),
        ("", "6.4", []),
    ],
)
def test_the_allocator_may_grow_unless_its_options_are_set(monkeypatch, variable, hip, expected):
    given = []
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    if variable:
        monkeypatch.setenv(variable, "max_split_size_mb:64")
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", given.append, raising=False)
    CudaDevice().grow_segments()
    assert given == expected
