"""A GPU without hardware: the real program runs on device "cuda" with shapes, dtypes and devices, but without numbers.

    from tests.fake_gpu import device        # before torch is imported
    with device.FakeGpu() as gpu:
        ...                                  # tensors of "cuda" take no memory, those of "cpu" are real
    gpu.syncs, gpu.launches, gpu.collectives

A number of the device reads as 0. An operator that mixes devices raises FakeTensorDeviceMismatchError. What it can't
show: numbers, races between streams, NCCL, memory.
"""

import ctypes
import hashlib
import os
import re
import subprocess
import sys
import tempfile
import traceback
import types
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PROJECT = HERE.parent.parent


def _load_guard() -> ctypes.CDLL:
    """Compiles `guard.cpp`, once for each version of PyTorch, and loads it."""
    spec = find_spec("torch")
    assert spec is not None
    assert spec.submodule_search_locations
    torch_folder = Path(spec.submodule_search_locations[0])
    source = HERE / "guard.cpp"
    state = source.read_bytes() + (torch_folder / "version.py").read_bytes() + str(torch_folder).encode()
    library = (
        Path(tempfile.gettempdir()) / f"farsight-fake-gpu-{os.getuid()}-{hashlib.sha256(state).hexdigest()[:16]}.so"
    )
    if not library.exists():
        part = library.with_suffix(f".{os.getpid()}")
        includes = [f"-I{torch_folder / 'include'}", f"-I{torch_folder / 'include/torch/csrc/api/include'}"]
        libraries = [f"-L{torch_folder / 'lib'}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch_folder / 'lib'}"]
        compiler = [os.environ.get("CXX", "g++"), "-O0", "-std=c++20", "-fPIC", "-shared"]
        subprocess.run([*compiler, *includes, str(source), "-o", str(part), *libraries], check=True)
        part.rename(library)
    return ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


assert "torch" not in sys.modules, "import tests.fake_gpu.device before torch: autograd looks for devices as it loads"
_guard = _load_guard()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed.fsdp  # noqa: E402  and the parts of PyTorch that look at the device as they load
import torch.distributed.tensor.parallel  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.distributed._tools.fake_collectives import CollectiveOp, collective_ops, sync_ops  # noqa: E402  also gives them shapes on fake tensors
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

_guard.replace_guard()
aten = torch.ops.aten

ALLOCATES = re.compile(r"::(new_)?empty|::detach|::alias")
NUMBERS = 64
"""Bytes."""
KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "send", "recv")

H200 = types.SimpleNamespace(
    name="NVIDIA H200", total_memory=141 * 10**9, multi_processor_count=132, major=9, minor=0, warp_size=32,
    L2_cache_size=60 * 2**20, gcnArchName="", shared_memory_per_block_optin=232448, max_threads_per_multi_processor=2048,
    regs_per_multiprocessor=65536,
)  # fmt: skip

_running: "FakeGpu | None" = None


def _sync(what: str) -> None:
    if _running is not None:
        _running.sync(what)


class Stream:
    """Work of this stream has always ended."""

    device_index, cuda_stream, stream_id, device_type = 0, 0, 0, 1

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def wait_stream(self, other: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def record_event(self, event: Any = None) -> Any:
        return event or Event()

    def synchronize(self) -> None:
        _sync("stream.synchronize")

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *args: object) -> None: ...


class Event:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def record(self, stream: Any = None) -> None: ...
    def wait(self, stream: Any = None) -> None: ...
    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        _sync("event.synchronize")

    def elapsed_time(self, other: Any) -> float:
        return 1.0


class CUDAGraph:
    """Records nothing: a replay is one launch."""

    def replay(self) -> None:
        assert _running is not None
        _running.launches["graph replay"] += 1


@contextmanager
def _nothing(*args: Any, **kwargs: Any) -> Iterator[Any]:
    yield args[0] if args else None


def _patch() -> None:
    """Has PyTorch see eight H200s, and processes a group of ranks of which only this one exists."""
    stream = Stream()
    for module in (torch.cuda, torch.accelerator):
        shared = {
            "is_available": lambda: True, "device_count": lambda: 8, "current_stream": lambda device=None: stream,
            "synchronize": lambda device=None: _sync("synchronize"), "empty_cache": lambda: None,
            "memory_allocated": lambda device=None: 0, "max_memory_allocated": lambda device=None: 0,
            "reset_peak_memory_stats": lambda device=None: None,
        }  # fmt: skip
        for name, value in shared.items():
            setattr(module, name, value)
    for name, value in {
        "is_initialized": lambda: True, "init": lambda: None, "_lazy_init": lambda: None, "current_device": lambda: 0,
        "set_device": lambda device: None, "device": _nothing, "stream": _nothing, "Stream": Stream, "Event": Event,
        "graph": lambda graph, **options: _nothing(), "CUDAGraph": CUDAGraph,
        "default_stream": lambda device=None: stream, "get_device_capability": lambda device=None: (9, 0),
        "get_device_name": lambda device=None: H200.name, "get_device_properties": lambda device=None: H200,
        "is_bf16_supported": lambda *args, **kwargs: True, "memory_stats": lambda device=None: {},
        "get_rng_state": lambda device=None: torch.zeros(16, dtype=torch.uint8), "set_rng_state": lambda state, device=None: None,
        "manual_seed": lambda seed: None, "manual_seed_all": lambda seed: None, "_is_in_bad_fork": lambda: False,
        "is_current_stream_capturing": lambda: False, "mem_get_info": lambda device=None: (140 * 10**9, 141 * 10**9),
    }.items():  # fmt: skip
        setattr(torch.cuda, name, value)
    torch._subclasses.fake_tensor.init_gpu_context = lambda device: None  # makes a real tensor: PyTorch before 2.13
    torch.Event = Event  # type: ignore[assignment, misc]  # a stand-in
    torch.accelerator.current_accelerator = lambda check_available=False: torch.device("cuda")  # type: ignore[assignment]  # a stand-in
    torch.accelerator.current_device_index = lambda: 0  # type: ignore[assignment]  # a stand-in
    torch.accelerator.set_device_index = lambda device: None  # type: ignore[assignment]  # a stand-in
    torch.get_device_module = lambda device=None: (
        torch.cuda
        if device is None or torch.device(device).type == "cuda"
        else getattr(torch, torch.device(device).type)
    )
    torch.Tensor.pin_memory = lambda self, device=None: _pinned(self.clone())  # type: ignore[method-assign, assignment]  # a stand-in
    torch._C._cuda_getCurrentRawStream = lambda device=0: 0  # type: ignore[attr-defined]  # absent from the wheel for CPUs

    class Generator(torch.Generator):
        """On the CPU, wherever it is asked for: numbers mean nothing here."""

        def __new__(cls, device: Any = "cpu") -> "Generator":
            return super().__new__(cls, device="cpu")

    torch.Generator = Generator  # type: ignore[misc]  # a stand-in

    connect, new_group = dist.init_process_group, dist.new_group

    def init_process_group(backend: Any = None, **options: Any) -> None:
        connect("fake", store=FakeStore(), rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))

    dist.init_process_group = init_process_group
    dist.new_group = lambda *args, backend=None, **options: new_group(*args, backend="fake", **options)
    dist.barrier = lambda *args, **options: None
    dist.broadcast_object_list = lambda objects, *args, **options: None

    def all_gather_object(found: list[Any], own: Any, *args: Any, **options: Any) -> None:
        found[:] = [own] * len(found)

    dist.all_gather_object = all_gather_object


_patch()


class FakeGpu(TorchDispatchMode):
    """Makes tensors of device "cuda" fake, and records what the program asks of the device.

    Attributes:
        syncs: how often the host waits for the device, by what and line of the project.
        uploads: copies to the device from memory that is not pinned, by line: the driver copies these twice.
        dispatches: all operators on the device by name, views too; each takes the host some microseconds.
        launches: those of them that compute something; a custom operator counts once, however many kernels it launches.
        collectives: by group and kind, their number and the bytes that this rank sends, if they are rings; "numbers" are those
            of a few scalars.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.syncs: Counter[str] = Counter()
        self.uploads: Counter[str] = Counter()
        self.dispatches: Counter[str] = Counter()
        self.launches: Counter[str] = Counter()
        self.collectives: dict[tuple[str, str], tuple[int, int]] = {}

    def clear(self) -> None:
        for record in (self.syncs, self.uploads, self.dispatches, self.launches, self.collectives):
            record.clear()

    def __enter__(self) -> "FakeGpu":
        global _running
        _running = self
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(…, device="cuda") then copies, where this mode sees it
        return super().__enter__()

    def __exit__(self, *args: object) -> None:
        global _running
        _running = None
        super().__exit__(*args)

    def where(self) -> str:
        """The innermost line of the project on the stack; in autograd's thread there may be none."""
        frames = traceback.extract_stack()[:-2]
        ours = [frame for frame in frames if frame.filename.startswith(str(PROJECT)) and ".venv" not in frame.filename]
        ours = [frame for frame in ours if not frame.filename.startswith(str(HERE))]
        if ours:
            return f"{Path(ours[-1].filename).relative_to(PROJECT)}:{ours[-1].lineno} {ours[-1].line}"
        return f"{frames[-1].filename.rpartition('site-packages/')[2]}:{frames[-1].lineno}"

    def sync(self, what: str) -> None:
        """Records that the host waits for the device."""
        self.syncs[f"{what} at {self.where()}"] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        on_device = any(x.device.type == "cuda" for x in tensors)
        target = kwargs.get("device")
        to_device = target is not None and torch.device(target).type == "cuda"
        if kwargs.pop("pin_memory", None) and not (on_device or to_device):
            return _pinned(func(*args, **kwargs))
        if not (on_device or to_device):
            return func(*args, **kwargs)
        if func.namespace == "prim":
            return args[0].device if func._schema.name == "prim::device" else func(*args, **kwargs)
        read = self._read(func, args, kwargs, tensors)
        if read is not NotImplemented:
            return read
        with self.fake:
            out = func(*args, **kwargs)
        self._count(func, args, out)
        return out

    def _read(self, func: Any, args: Any, kwargs: Any, tensors: Any) -> Any:
        """Operators that read numbers of the device, or bring some to it; NotImplemented for all others."""
        target = None if kwargs.get("device") is None else torch.device(kwargs["device"]).type
        if func is aten._local_scalar_dense.default:
            self.sync("item")
            return torch.zeros((), dtype=args[0].dtype).item()
        if func is aten.equal.default:
            self.sync("equal")
            return True
        if func in (aten.nonzero.default, aten.masked_select.default, aten._unique2.default):
            self.sync(func._schema.name)
        if func in (aten.index.Tensor, aten.index_put_.default, aten._index_put_impl_.default):
            fills = func is not aten.index.Tensor and args[2].numel() == 1  # becomes masked_fill
            for index in args[1]:
                if index is not None and index.dtype in (torch.bool, torch.uint8) and not fills:
                    self.sync("index by a mask")
                elif index is not None and index.device.type == "cpu":
                    self.sync("index by a CPU tensor")
        if func is aten._to_copy.default and target == "cpu":
            if not kwargs.get("non_blocking"):
                self.sync("copy to the CPU")
            return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        if func is aten._to_copy.default and target == "cuda" and args[0].device.type == "cpu":
            self._upload(args[0], kwargs.get("non_blocking", False))
            x = args[0]
            with self.fake:
                return torch.empty_strided(
                    x.shape, x.stride(), dtype=kwargs.get("dtype") or x.dtype, device=kwargs["device"]
                )
        if func is aten.copy_.default and len({x.device.type for x in args[:2]}) == 2:
            to, source, *non_blocking = args
            if source.device.type == "cpu":
                self._upload(source, bool(non_blocking and non_blocking[0]))
                return to
            if not (non_blocking and non_blocking[0]):
                self.sync("copy to the CPU")
            return to.zero_()
        return NotImplemented

    def _upload(self, source: Any, non_blocking: bool) -> None:
        if not non_blocking:
            self.sync("copy from the CPU")
        elif not is_pinned(source):
            self.uploads[self.where()] += 1

    def _count(self, func: Any, args: Any, out: Any) -> None:
        name = func._schema.name
        if func not in collective_ops:
            self.dispatches[name] += 1
            if not func.is_view and not ALLOCATES.search(name):
                self.launches[name] += 1
        elif func not in sync_ops:
            kind = next(kind for kind in KINDS if kind.replace("_", "") in name.replace("_", ""))
            group = CollectiveOp.get_process_group(func, args)
            sent = _largest((args, out)) * (group.size() - 1) // group.size() * (2 if kind == "all_reduce" else 1)
            if kind == "all_to_all":
                sent = _largest(out)  # what a rank keeps isn't in the buffers
            elif _largest((args, out)) <= NUMBERS:
                kind = "numbers"
            calls, size = self.collectives.get((group.group_name, kind), (0, 0))
            self.collectives[group.group_name, kind] = calls + 1, size + sent


def _largest(tree: Any) -> int:
    return max((x.nbytes for x in tree_leaves(tree) if isinstance(x, torch.Tensor)), default=0)


_pins: "torch.utils.weak.WeakIdKeyDictionary" = torch.utils.weak.WeakIdKeyDictionary()


def _pinned(x: Any) -> Any:
    _pins[x] = True
    return x


def is_pinned(x: Any) -> bool:
    """True for a tensor that was made pinned, and for its views."""
    return x in _pins or (x._base is not None and x._base in _pins)
