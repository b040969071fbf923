"""What the kernels know about the machine: the processor that code is generated for, its cores and its caches.

The processor that code is generated for is the host, or what NUMBA_CPU_NAME and NUMBA_CPU_FEATURES say; the host's own
capabilities are nobody's business beside it. Nothing else in this package asks the system.
"""

import ctypes
import hashlib
import json
import math
import os
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite
import numpy as np

from onnx_backprop.ort_ops.compiler.cache import cache_folder, read, write

VECTOR_VARIABLE = "ONNX_BACKPROP_VECTOR_LENGTH"
TRIPLE_VARIABLE = "ONNX_BACKPROP_TRIPLE"
MOST_PROCESSORS = 64
_LENGTHS = ("4", "8", "16", "32", "64")
_CACHE = 32 << 20  # where the system does not tell


@cache
def backend() -> Any:
    """LLVM, ready to make machine code. Its library takes 46 MiB, which a process that compiles nothing spares."""
    from llvmlite import binding

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    if TRIPLE_VARIABLE in os.environ:  # to make machine code for elsewhere, as a wheel may carry it
        binding.initialize_all_targets()
        binding.initialize_all_asmprinters()
    return binding


_CPUINFO, _BOOT = Path("/proc/cpuinfo"), Path("/proc/sys/kernel/random/boot_id")
_PROCESSORS = re.compile("^(?:vendor_id|cpu family|model|stepping|flags|Features|CPU )[^:]*:.*$", re.MULTILINE)


def _host() -> tuple[str, str, str]:
    """LLVM's names of this process's triple and of the processor, and what that has.

    Where the system tells one start from another, LLVM is asked once between two, for each description of processors:
    the system's, and what NumPy has found in this process, since an emulator's are others under the same system.
    """
    boot = _text(_BOOT)
    asked = [
        llvmlite.__version__,
        sys.platform,
        boot,
        *sorted({*_PROCESSORS.findall(_text(_CPUINFO))}),
        _capabilities(),
    ]
    folder = cache_folder() if boot else None
    path = folder and folder / "processor.json"
    answer = json.loads((path and read(path)) or b"{}")
    if answer.get("asked") != asked:
        binding = backend()
        try:
            features = binding.get_host_cpu_features().flatten()
        except RuntimeError:  # LLVM does not tell on this system
            features = ""
        answer = {"asked": asked, "host": [binding.get_process_triple(), binding.get_host_cpu_name(), features]}
        if path:
            write(path, json.dumps(answer).encode())
    triple, name, features = answer["host"]
    return triple, name, features


def _capabilities() -> list[str]:
    """The capabilities that NumPy has asked the processor itself for; none where it does not tell."""
    numpy: Any = np  # whose `show_runtime` prints them from there
    capabilities = getattr(numpy._core._multiarray_umath, "__cpu_features__", {})
    return sorted(name for name, has in capabilities.items() if has)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


TRIPLE, PROCESSOR, FEATURES = _host()
TRIPLE = os.environ.get(TRIPLE_VARIABLE, TRIPLE)
if os.environ.get("NUMBA_CPU_NAME"):  # which has what its name says
    PROCESSOR, FEATURES = os.environ["NUMBA_CPU_NAME"], ""
FEATURES = os.environ.get("NUMBA_CPU_FEATURES", FEATURES)

_PROBE = """
define void @probe(ptr %place) {
  %x = load <16 x i32>, ptr %place
  %y = mul <16 x i32> %x, %x
  store <16 x i32> %y, ptr %place
  ret void
}
"""


def assembly(module: str) -> str:
    """What LLVM makes of a module, given as text, for the processor that code is generated for."""
    llvm = backend()
    machine = llvm.Target.from_triple(TRIPLE).create_target_machine(cpu=PROCESSOR, features=FEATURES)
    return machine.emit_assembly(llvm.parse_assembly(module))


def _width() -> int:
    """How many float32, and how many int32, one vector register holds.

    LLVM is asked what it uses, since a processor's name implies features and features take others away. It is asked
    once, since its code generator takes 16 MiB of memory, which a process that compiles nothing can spare.
    """
    asked = repr((llvmlite.__version__, TRIPLE, PROCESSOR, FEATURES, _PROBE)).encode()
    folder = cache_folder()
    path = folder and folder / f"{hashlib.sha256(asked).hexdigest()[:24]}.width"
    known = path and read(path)
    if known:
        return int(known)
    text = assembly(_PROBE)
    width = 16 if "%zmm" in text else 8 if "%ymm" in text else 4
    if path:
        write(path, str(width).encode())
    return width


def _vector_length(width: int) -> int:
    """How many float32 a vector of the kernels has: the environment may force another power of two."""
    forced = os.environ.get(VECTOR_VARIABLE)
    return int(forced) if forced in _LENGTHS else width


def complaint() -> str:
    """What is wrong with the environment, '' if nothing is."""
    forced = os.environ.get(VECTOR_VARIABLE)
    if not forced or forced in _LENGTHS:
        return ""
    return f"{VECTOR_VARIABLE}: expected a power of two from 4 to 64, got {forced!r}"


WIDTH = _width()
VECTOR = _vector_length(WIDTH)
REGISTERS = 16 if TRIPLE.startswith("x86_64") and WIDTH < 16 else 32
# whether one instruction takes any lane from a vector, or from two (x86 from AVX2 on)
PERMUTES = VECTOR in (8, 16) and VECTOR <= WIDTH


# Processors by LLVM's names that a wheel may carry machine code for, the widest first, and what is needed to run it.
_V4 = ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
TILE_LEVEL = "amx-"  # before LLVM's name: what needs registers of matrices, and nothing else
LEVELS = (
    (f"{TILE_LEVEL}x86-64-v4", "x86_64", (*_V4, "amx-tile", "amx-bf16")),
    ("x86-64-v4", "x86_64", _V4),
    ("x86-64-v3", "x86_64", ("avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe")),
    ("generic", "aarch64", ("neon",)),
)


def levels() -> list[str]:
    """Which of them this is, if no other processor is asked for."""
    if any(name in os.environ for name in ("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES", TRIPLE_VARIABLE)):
        return []
    return [
        name
        for name, architecture, needed in LEVELS
        if TRIPLE.startswith(architecture) and {f"+{feature}" for feature in needed} <= set(FEATURES.split(","))
    ]


MATRICES = "+amx-bf16,+amx-tile,+avx512bw"  # features
_PERMISSION, _TILE_DATA = (158, 0x1023), 18  # of Linux on x86-64: arch_prctl(ARCH_REQ_XCOMP_PERM, …)


@cache
def matrix_tiles() -> bool:
    """Whether there are registers of whole matrices of bfloat16, which the system lets a process use that asks.

    Code for elsewhere asks there (`plugin/runtime.c`).
    """
    if not ("linux" in TRIPLE and VECTOR == 16 and set(MATRICES.split(",")) <= set(FEATURES.split(","))):
        return False
    if TRIPLE_VARIABLE in os.environ:
        return True
    try:
        return ctypes.CDLL(None).syscall(*map(ctypes.c_long, (*_PERMISSION, _TILE_DATA))) == 0
    except (OSError, AttributeError):
        return False


def facts() -> str:
    """All that machine code assumes of the machine, but its processor's instructions."""
    return f"{WIDTH} {VECTOR} {REGISTERS} {PERMUTES}"


def cores() -> int:
    """How many cores this process may use: of those that it is bound to, no more than its container's share."""
    counted = _bound()
    share = _quota(Path("/"))
    return max(1, min(counted, math.ceil(share)) if share else counted)


def processors() -> int:
    """How many threads work is cut for; results do not depend on it."""
    return min(cores(), MOST_PROCESSORS)


def bound_to() -> list[int]:
    """The numbers of the cores that this process is bound to; none where the system does not tell."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def _bound() -> int:
    count = getattr(os, "process_cpu_count", None)
    if count is not None:  # from Python 3.13 on
        return count() or 1
    if hasattr(os, "sched_getaffinity"):  # Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@cache
def _quota(root: Path) -> float | None:
    """Of how many cores control groups grant the time to this process: the least of its groups; None: no limit.

    A group limits those inside it. In a container the own group is seen as the root, or under a path of the host's
    that does not exist here; what lies on the way is asked as far as it exists.
    """
    shares = [share for folder in _groups(root) if (share := _share(folder)) is not None]
    return min(shares, default=None)


def _groups(root: Path) -> Iterator[Path]:
    """The folders of this process's control groups that limit processor time, from its own outwards."""
    mounted = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        # version 2 has one tree, version 1 one for each set of controllers
        tree = mounted / controllers
        # a group outside of what a container sees begins with ".."
        group = tree / (path.lstrip("/") if ".." not in path.split("/") else "")
        yield from (folder for folder in (group, *group.parents) if folder.is_relative_to(tree))


def _share(folder: Path) -> float | None:
    """Quota over period of one control group, as version 2 writes it or version 1."""
    words = _text(folder / "cpu.max").split()
    if not words:
        words = [_text(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
    if len(words) != 2 or not all(re.fullmatch("[1-9][0-9]*", word) for word in words):
        return None  # "max", or -1, or no such file
    return int(words[0]) / int(words[1])


@cache
def last_level_cache() -> int:
    """Bytes of the largest cache, or a guess; results do not depend on it."""
    try:
        reported = os.sysconf("SC_LEVEL3_CACHE_SIZE")
    except (AttributeError, ValueError, OSError):  # not told on this system
        reported = 0
    return reported if reported > 0 else _listed_cache(Path("/")) or _CACHE


def _listed_cache(root: Path) -> int:
    """Bytes of the largest cache that Linux lists for the first core, 0 where it lists none."""
    sizes = (_text(path).strip() for path in (root / "sys/devices/system/cpu/cpu0/cache").glob("index*/size"))
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    return max((int(size[:-1]) * units[size[-1]] for size in sizes if re.fullmatch("[0-9]+[KMG]", size)), default=0)
