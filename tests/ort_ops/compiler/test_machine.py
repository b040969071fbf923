"""What the kernels believe about the processor is what LLVM is told, and cores are those that may be used."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from onnx_backprop.ort_ops.compiler import cache, machine

FACTS = "from onnx_backprop.ort_ops.compiler import cache, machine as m; from onnx_backprop.ort_ops.runtime import call as b; print({})"


def printed(what: str, **environment: str) -> str:
    """What a process of its own prints; variables of this one's that choose a processor do not count."""
    chosen = ("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES", machine.VECTOR_VARIABLE)
    inherited = {name: value for name, value in os.environ.items() if name not in chosen}
    command = [sys.executable, "-c", FACTS.format(what)]
    return subprocess.run(command, env=inherited | environment, capture_output=True, text=True, check=True).stdout


def test_here() -> None:
    assert machine.VECTOR in (2, 4, 8, 16, 32, 64)
    assert machine.WIDTH in (4, 8, 16)
    assert machine.REGISTERS in (16, 32)
    assert 1 <= machine.cores() <= (os.cpu_count() or 1)
    assert 1 <= machine.processors() <= machine.MOST_PROCESSORS
    assert machine.last_level_cache() >= 1 << 15


# LLVM generates code for any x86 processor on an x86 one; nothing of it is run
X86 = [
    ({"NUMBA_CPU_NAME": "generic"}, "4 16 False"),
    ({"NUMBA_CPU_NAME": "sandybridge", "NUMBA_CPU_FEATURES": ""}, "4 16 False"),
    ({"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": ""}, "8 16 True"),
    ({"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "-avx2"}, "4 16 False"),
    ({"NUMBA_CPU_NAME": "skylake-avx512", "NUMBA_CPU_FEATURES": ""}, "16 32 True"),
    ({"NUMBA_CPU_NAME": "skylake-avx512", "NUMBA_CPU_FEATURES": "-avx512f"}, "8 16 True"),
    ({"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": "+avx512f"}, "16 32 True"),
    ({"NUMBA_CPU_NAME": "generic", machine.VECTOR_VARIABLE: "8"}, "8 16 False"),
    ({"NUMBA_CPU_NAME": "skylake-avx512", "NUMBA_CPU_FEATURES": "", machine.VECTOR_VARIABLE: "8"}, "8 32 True"),
    ({"NUMBA_CPU_NAME": "skylake-avx512", "NUMBA_CPU_FEATURES": "", machine.VECTOR_VARIABLE: "4"}, "4 32 False"),
]


@pytest.mark.skipif(not machine.TRIPLE.startswith("x86_64"), reason="names of x86 processors")
def test_llvm_is_asked_once(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "cache_folder", lambda: tmp_path)
    assert machine._width() == machine.WIDTH
    (kept,) = tmp_path.iterdir()
    monkeypatch.setattr(machine, "assembly", lambda _: "no registers")
    assert machine._width() == machine.WIDTH
    kept.write_bytes(b"damaged" * 9)
    assert machine._width() == 4


def test_llvm_is_asked_once_about_the_processor(monkeypatch, tmp_path: Path) -> None:
    """Until the system has started again, the processor is another one, or the file is damaged."""
    cpuinfo, boot = tmp_path / "cpuinfo", tmp_path / "boot_id"
    cpuinfo.write_text("processor : 0\nflags\t: sse avx\ncpu MHz : 1\n")
    boot.write_text("first\n")
    calls = []

    class Binding:
        get_process_triple = staticmethod(lambda: "triple")
        get_host_cpu_name = staticmethod(lambda: "name")

        @staticmethod
        def get_host_cpu_features():
            calls.append(1)
            raise RuntimeError

    monkeypatch.setattr(machine, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(machine, "_CPUINFO", cpuinfo)
    monkeypatch.setattr(machine, "_BOOT", boot)
    monkeypatch.setattr(machine, "backend", lambda: Binding)
    for count, path, text in (
        (1, cpuinfo, "processor : 0\nflags\t: sse avx\ncpu MHz : 2\n"),
        (1, cpuinfo, "processor : 0\nflags\t: sse\n"),
        (2, boot, "second\n"),
        (3, tmp_path / "processor.json", "damaged"),
        (4, boot, ""),
    ):
        for _ in range(2):
            assert machine._host() == ("triple", "name", "")
        assert len(calls) == count
        path.write_text(text)
    machine._host()
    assert len(calls) == 5
    boot.write_text("third\n")
    for count, features in ((6, ["SSE"]), (7, ["SSE", "AVX"])):  # as an emulator has, under the same system
        monkeypatch.setattr(machine, "_capabilities", lambda features=features: features)
        for _ in range(2):
            machine._host()
            assert len(calls) == count


@pytest.mark.skipif(not (machine.TRIPLE.startswith("x86_64") and "+avx2" in machine.FEATURES), reason="no AVX2")
def test_capabilities_are_those_of_the_processor() -> None:
    assert "AVX2" in machine._capabilities()


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that runs as a number: that had been an error when this was imported."""

    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", home)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("NUMBA_CACHE_DIR", "/given")
    assert list(cache._folders()) == [Path("/given/onnx_backprop")]
    monkeypatch.delenv("NUMBA_CACHE_DIR")
    assert [folder.name for folder in cache._folders()] == ["__pycache__"]
    monkeypatch.setenv("XDG_CACHE_HOME", "/other")
    assert list(cache._folders())[1:] == [Path("/other/onnx_backprop")]


def test_what_numba_is_told() -> None:
    names = set()
    for environment, expected in X86:
        *facts, name = printed("m.VECTOR, m.REGISTERS, m.PERMUTES, b.compute.name", **environment).split()
        assert " ".join(facts) == expected, environment
        names.add(name)
    distinct = {(e.get("NUMBA_CPU_NAME"), e.get("NUMBA_CPU_FEATURES")) for e, _ in X86}
    assert len(names) == len(distinct), "cached code of one processor would be run by another"


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux binds processes to cores")
def test_cores_that_the_process_is_bound_to() -> None:
    first = min(os.sched_getaffinity(0))
    bind = f"__import__('os').sched_setaffinity(0, [{first}])"
    assert printed(f"{bind}, m.cores(), m.processors()") == "None 1 1\n"


def written(root: Path, files: dict[str, str]) -> Path:
    for path, text in files.items():
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


V1, V2 = "sys/fs/cgroup/cpu,cpuacct", "sys/fs/cgroup"
GROUPS_V1 = "12:cpuset:/far\n4:cpu,cpuacct:/docker/abc\n1:name=systemd:/docker/abc\n"
QUOTAS = {
    "no groups": ({}, None),
    "version 2, a container": ({"proc/self/cgroup": "0::/\n", f"{V2}/cpu.max": "150000 100000\n"}, 1.5),
    "version 2, no limit": ({"proc/self/cgroup": "0::/a\n", f"{V2}/a/cpu.max": "max 100000\n"}, None),
    "version 2, the least of all": (
        {
            "proc/self/cgroup": "0::/a/b\n",
            f"{V2}/a/b/cpu.max": "400000 100000\n",
            f"{V2}/a/cpu.max": "60000 20000\n",
            f"{V2}/cpu.max": "max 100000\n",
            f"{V2}/other/cpu.max": "1000 100000\n",
        },
        3.0,
    ),
    "version 2, a path of the host's": (
        {"proc/self/cgroup": "0::/kubepods/pod7\n", f"{V2}/cpu.max": "50000 100000\n"},
        0.5,
    ),
    "version 1": (
        {
            "proc/self/cgroup": GROUPS_V1,
            f"{V1}/docker/abc/cpu.cfs_quota_us": "250000\n",
            f"{V1}/docker/abc/cpu.cfs_period_us": "100000\n",
            f"{V1}/cpu.cfs_quota_us": "-1\n",
            f"{V1}/cpu.cfs_period_us": "100000\n",
        },
        2.5,
    ),
    "version 1, no limit": (
        {
            "proc/self/cgroup": GROUPS_V1,
            f"{V1}/docker/abc/cpu.cfs_quota_us": "-1\n",
            f"{V1}/docker/abc/cpu.cfs_period_us": "100000\n",
        },
        None,
    ),
    "version 1, a path of the host's": (
        {
            "proc/self/cgroup": GROUPS_V1 + "0::/\n",
            f"{V1}/cpu.cfs_quota_us": "200000\n",
            f"{V1}/cpu.cfs_period_us": "100000\n",
        },
        2.0,
    ),
    "no group may leave the tree": (
        {"proc/self/cgroup": "0::/../..\n", "sys/cpu.max": "1000 100000\n", f"{V2}/cpu.max": "500000 100000\n"},
        5.0,
    ),
}


@pytest.mark.parametrize("name", QUOTAS)
def test_the_share_of_a_container(tmp_path: Path, name: str) -> None:
    files, expected = QUOTAS[name]
    assert machine._quota(written(tmp_path, files)) == expected


@pytest.mark.parametrize(
    ("bound", "share", "expected"), [(8, None, 8), (8, 1.5, 2), (8, 0.2, 1), (2, 3.5, 2), (4, 4.0, 4), (200, None, 200)]
)
def test_cores_are_the_least_of_both(monkeypatch, bound: int, share: float | None, expected: int) -> None:
    monkeypatch.setattr(machine, "_bound", lambda: bound)
    monkeypatch.setattr(machine, "_quota", lambda _root: share)
    assert machine.cores() == expected
    assert machine.processors() == min(expected, machine.MOST_PROCESSORS)


def test_the_last_level_cache(monkeypatch, tmp_path: Path) -> None:
    folder = "sys/devices/system/cpu/cpu0/cache"
    listed = {"index0": "48K", "index2": "2048K", "index3": "36M", "index4": ""}
    root = written(tmp_path, {f"{folder}/{index}/size": f"{size}\n" for index, size in listed.items()})
    assert machine._listed_cache(root) == 36 << 20
    assert machine._listed_cache(tmp_path / "nothing") == 0
    for reported, expected in ((0, 77), (-1, 77), (5 << 20, 5 << 20)):
        monkeypatch.setattr(os, "sysconf", lambda _name, reported=reported: reported)
        monkeypatch.setattr(machine, "_listed_cache", lambda _root: 77)
        assert machine.last_level_cache.__wrapped__() == expected


def test_nobody_else_asks_the_system() -> None:
    asks = re.compile(r"cpu_count|sched_getaffinity|sysconf\(|get_host_cpu|/proc/|/sys/|cgroup")
    root = Path(__file__).parents[3]
    asking = [
        path.name
        for folder in ("onnx_backprop", "opset", "ort_ops", "converters", "models", "benchmarks")
        for path in (root / folder).rglob("*.py")
        if asks.search(path.read_text())
    ]
    assert set(asking) == {"machine.py", "memory_curve.py", "huge_pages.py"}  # the last two of their own memory
