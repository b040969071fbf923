"""Whole networks with compiled libraries: the losses, steps beside those of `Trainer`, sizes, other systems.

    python -m tests.plugin [--only demo resnet] [--rounds 10] [--sessions 10000] [--folder .plugin]

In stock onnxruntime, of this version and of 1.20, and in a program in C++, without this package: losses as the
Trainer's; seconds of processor time of a step beside its. The C++ program runs for Windows and aarch64 too, under wine64
and qemu-aarch64-static, where these and Debian's compilers for them are installed; programs in C# and Java train a small
network where Mono, a JDK and npm are; what is not there is said. Exit code 1 where a loss or a size is not what it should
be.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from unittest import mock

import numpy as np
import onnxruntime

import onnx_backprop as ob
from onnx_backprop.ort_ops.compiler import machine
from onnx_backprop.ort_ops.compiler.machine import TRIPLE_VARIABLE
from onnx_backprop.ort_ops.plugin import targets
from tests.plugin import languages
from tests.plugin.networks import NETWORKS, Network
from tests.plugin.test_library import SIZES, batches, compiled, library_in, sessions, small
from tests.plugin.windows import WINE, library_of, windows_wheel, wine
from tests.processors.emulated import CPU, CPUINFO
from tests.runtimes.__main__ import environment

ROOT = Path(__file__).resolve().parents[2]
OLD = "1.20"
LARGEST = {"demo": 1_000_000, "resnet": 2_000_000}  # bytes of a library
STEPS, RATE = 10, 1e-3
WINDOWS, ARM = "windows-x86_64-v3", "linux-aarch64"
MINGW = "x86_64-w64-mingw32-g++"
X86, LESS = "qemu-x86_64-static", ("x86_64-v3", "Haswell")
QEMU, CROSS = "qemu-aarch64-static", "aarch64-linux-gnu-g++"
SOURCE = ROOT / "examples" / "cpp" / "train.cpp"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.plugin", description="Train networks with compiled libraries."
    )
    parser.add_argument("--only", nargs="+", default=list(NETWORKS), choices=list(NETWORKS))
    parser.add_argument("--rounds", type=int, default=10, help="of steps that are timed (%(default)s)")
    parser.add_argument("--sessions", type=int, default=10_000, help="to open and close (%(default)s)")
    parser.add_argument("--emulated", type=int, default=2, help="steps on other systems (%(default)s)")
    parser.add_argument("--folder", type=Path, default=ROOT / ".plugin", help="for all that is made (%(default)s)")
    given = parser.parse_args()
    folder: Path = given.folder.resolve()
    version = ".".join(onnxruntime.__version__.split(".")[:2])
    stock = {name: environment(folder / f"onnxruntime-{name}", name) for name in (version, OLD)}
    program = [str(languages.built(SOURCE, folder))]
    programs = {targets.here(): program, _portable("linux"): program, **_windows(folder, version)}
    aarch64 = _aarch64(folder, version)
    wrong: list[str] = []
    for name in given.only:
        network = NETWORKS[name]
        emulated = replace(network, shape=network.emulated)
        wrong += _network(name, network, folder / name, stock, programs, given.emulated)
        if aarch64:
            wrong += _network(f"{name}, small", emulated, folder / f"{name}_emulated", {}, aarch64, given.emulated)
        least, median = _turns(folder / name, stock[version], given.rounds)
        print(f"{name}: a step takes {least:.2f} of the Trainer's at the least, {median:.2f} in the median", flush=True)
    wrong += _processors(folder, given.only[0])
    wrong += _languages(folder, compiled(folder / "small"))
    wrong += _windows_wheel(folder / "windows_wheel")
    with get_context("spawn").Pool(1) as alone:  # in memory that nothing has used before
        grown = alone.apply(sessions, (folder / "small", given.sessions))
    print(f"{given.sessions:,} sessions opened and closed: {grown / 1000:,.0f} KB more memory in the second half")
    wrong += [f"sessions: {grown:,} bytes of growth"] if grown > 16 << 20 else []
    print(*(f"WRONG: {each}" for each in wrong), sep="\n")
    print(f"plugin: {', '.join(given.only)} for {', '.join((*programs, *aarch64))}: {len(wrong)} wrong")
    return 1 if wrong else 0


def _network(
    name: str,
    network: Network,
    folder: Path,
    stock: dict[str, Path],
    programs: dict[str, list[str]],
    steps_of_others: int,
) -> list[str]:
    """Compile and train a network everywhere; what is wrong.

    The machine code of a processor like this one sums in the Trainer's order, on any system; without registers of matrices
    in the order of a Trainer that does without them here. That of others does not, and differences grow from step to
    step: there a few steps are compared.
    """
    graph = network.graph()
    folder.mkdir(exist_ok=True)
    graph.save(folder / "graph.onnx")
    libraries = ob.compile_plugin(graph, folder, lengths=network.lengths, target=list(programs))
    data = network.batches(graph, STEPS)
    np.savez(folder / "data.npz", **data)
    (folder / "batches").write_bytes(b"".join(data[k][n].tobytes() for n in range(STEPS) for k in graph.inputs))
    losses_here = _losses(graph, data)
    with mock.patch.object(machine, "FEATURES", machine.FEATURES.replace("+amx-tile", "-amx-tile")):
        machine.matrix_tiles.cache_clear()
        losses_elsewhere = _losses(graph, data)
    machine.matrix_tiles.cache_clear()
    wrong: list[str] = []

    def compare(where: str, target: str, command: list[str], rtol: float, steps: int = STEPS) -> None:
        expected = losses_here if target == targets.here() else losses_elsewhere
        (folder / "checkpoint.safetensors").unlink(missing_ok=True)
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        losses = [float(line) for line in done.stdout.split("\n")[:steps] if line.strip()]
        if done.returncode or len(losses) != steps:
            wrong.append(f"{name}, {where}: {done.stderr.strip()[-400:]}")
            return
        off = max(abs(a / b - 1) for a, b in zip(losses, expected, strict=False))
        wrong.extend([f"{name}, {where}: losses differ by {off:.1e}"] if off > rtol else [])
        print(f"{name}, {where}: losses of {steps} steps differ by {off:.1e} of themselves at most", flush=True)

    for version, python in stock.items():
        arguments = [str(folder), targets.here(), str(folder / "data.npz"), "--learning-rate", str(RATE)]
        compare(
            f"onnxruntime {version}",
            targets.here(),
            [str(python), str(ROOT / "examples" / "plugin.py"), *arguments],
            1e-6,
        )
    for target, program in programs.items():
        (library,) = (folder / target).glob("onnx_backprop.*")
        size = library.stat().st_size
        print(f"{name}, {target}: a library of {size / 1000:,.0f} KB", flush=True)
        wrong += [f"{name}, {target}: {size:,} bytes"] if size > LARGEST.get(name, 2_000_000) else []
        arguments = [_path(program, path) for path in (folder, library, folder / "batches")]
        alike = target in (targets.here(), _portable(target.partition("-")[0]))
        rtol, steps = (1e-6, STEPS) if alike else (1e-5, steps_of_others)
        compare(f"C++ on {target}", target, [*program, *arguments, str(steps), str(RATE), "2"], rtol, steps)
    assert len(libraries) == len(programs)
    return wrong


def _losses(graph: ob.TrainingGraph, data: Mapping[str, np.ndarray]) -> list[float]:
    trainer = ob.Trainer(graph, learning_rate=RATE)
    return [trainer.step({k: v[n] for k, v in data.items()}) for n in range(STEPS)]


def _portable(system: str) -> str:
    """The target of a system whose processors have the vectors of this one."""
    level = "x86_64-v4" if targets.here() == targets.AMX else targets.here().partition("-")[2]
    return f"{system}-{level}"


def _processors(folder: Path, name: str) -> list[str]:
    """A library says so where a processor has less than it needs; what is wrong."""
    if not (shutil.which(X86) and targets.here().startswith("linux-x86_64")):
        print(f"{X86} is not installed: no library met a lesser processor")
        return []
    levels = {"x86_64-amx": ("Haswell", "Nehalem"), "x86_64-v4": ("Haswell", "Nehalem"), "x86_64-v3": ("Nehalem",)}
    for level in levels:
        graph = folder / name / "graph.onnx"
        ob.compile_plugin(graph, folder / name, lengths=NETWORKS[name].lengths, target=f"linux-{level}")
    wrong: list[str] = []
    for level, processor, runs in (*((x, cpu, False) for x, cpus in levels.items() for cpu in cpus), (*LESS, True)):
        command = [X86, "-cpu", processor, "-E", f"LD_LIBRARY_PATH={folder / 'lib'}", folder / "train", folder / name]
        library = folder / name / f"linux-{level}" / "onnx_backprop.so"
        (folder / name / "checkpoint.safetensors").unlink(missing_ok=True)
        done = subprocess.run(
            [*command, library, folder / name / "batches", "1", "0.001", "1"],
            capture_output=True,
            text=True,
            check=False,
        )
        refused = done.returncode == 1 and f"was compiled for linux-{level}" in done.stderr
        if (done.returncode == 0) != runs or refused == runs:
            wrong.append(f"linux-{level} on {processor}: {done.returncode} {done.stderr[-300:]}")
        print(f"a library for linux-{level} {'runs on' if runs else 'is refused by'} {processor}", flush=True)
    return wrong


def _path(program: list[str], path: Path) -> str:
    return f"Z:{path}" if WINE in program[0] else str(path)


def _turns(folder: Path, python: Path, rounds: int) -> tuple[float, float]:
    """Processor time of a step with the library, as a part of the Trainer's: of the least times, of the medians."""
    script, data = str(ROOT / "tests" / "plugin" / "turns.py"), str(folder / "data.npz")
    commands = (
        [python, script, "library", folder, targets.here(), data],
        [sys.executable, script, "trainer", folder, data],
    )
    workers = [
        subprocess.Popen(
            [str(word) for word in command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT) if n else ""},
        )
        for n, command in enumerate(commands)
    ]
    times: tuple[list[list[float]], list[list[float]]] = ([], [])

    def answer(worker: subprocess.Popen[str]) -> list[float]:
        assert worker.stdout
        durations: list[float] = json.loads(worker.stdout.readline())
        return durations

    first = [answer(worker) for worker in workers]
    np.testing.assert_allclose(*first, rtol=1e-6)
    for _ in range(rounds):
        for worker, durations in zip(workers, times, strict=True):
            assert worker.stdin
            worker.stdin.write("\n")
            worker.stdin.flush()
            durations.append(answer(worker))
    for worker in workers:
        worker.communicate()
    least = [min(one for one, _ in durations) for durations in times]
    median = [statistics.median(one for _, one in durations) for durations in times]
    return least[0] / least[1], median[0] / median[1]


def _languages(folder: Path, compiled_folder: Path) -> list[str]:
    """Programs in C# and Java train a small network, with its library and without; what is wrong."""
    wrong: list[str] = []
    for name, build in {"C#": languages.csharp, "Java": languages.java}.items():
        try:
            program = build(folder / build.__name__, languages.packages(folder / "unity"))
        except languages.MissingError as e:
            print(f"{name} was not run: {e}", flush=True)
            continue
        for library in (library_in(compiled_folder), "-"):
            what = f"{name}, {'standard operators' if library == '-' else 'the library'}"
            (compiled_folder / "checkpoint.safetensors").unlink(missing_ok=True)
            try:
                languages.check(program, compiled_folder, library, small(), batches(SIZES[0]))
            except AssertionError as e:
                wrong.append(f"{what}: {e}")
            else:
                print(f"{what}: losses, state and model of six steps are the Trainer's", flush=True)
    return wrong


def _windows(folder: Path, version: str) -> dict[str, list[str]]:
    """The command of the program for Windows, by the targets to make libraries for, where it can be made and run."""
    if not (wine() and shutil.which(MINGW)):
        print(f"{WINE} or {MINGW} is not installed: nothing runs as on Windows")
        return {}
    program = folder / "windows" / "train.exe"
    capi = library_of(program.parent, version, "win_amd64")
    shutil.copy(capi / "onnxruntime.dll", program.parent)
    dll = program.parent / "onnxruntime.dll"
    subprocess.run([MINGW, "-std=c++17", "-O2", "-static", "-o", program, SOURCE, dll], check=True)
    names = dict.fromkeys((_portable("windows"), WINDOWS))
    return {name: [wine(), str(program)] for name in names if name in targets.TARGETS}


def _aarch64(folder: Path, version: str) -> dict[str, list[str]]:
    """The command of the program for aarch64, where it can be made and run."""
    if not (shutil.which(QEMU) and shutil.which(CROSS)):
        print(f"{QEMU} or {CROSS} is not installed: nothing runs as on aarch64")
        return {}
    sysroot, program = folder / "aarch64", folder / "aarch64" / "train"
    capi = library_of(sysroot, version, "manylinux_2_28_aarch64")
    shutil.copy(next(capi.glob("libonnxruntime.*.*")), sysroot / "libonnxruntime.so.1")
    subprocess.run([CROSS, "-std=c++17", "-O2", "-o", program, SOURCE, sysroot / "libonnxruntime.so.1"], check=True)
    (sysroot / "proc").mkdir(exist_ok=True)  # onnxruntime ends where that describes another architecture
    (sysroot / "proc" / "cpuinfo").write_text("".join(CPUINFO.format(n) for n in range(2)))
    shutil.copytree("/usr/aarch64-linux-gnu/lib", sysroot / "lib", dirs_exist_ok=True)
    return {ARM: [QEMU, "-cpu", CPU, "-L", str(sysroot), "-E", f"LD_LIBRARY_PATH={sysroot}", str(program)]}


def _windows_wheel(folder: Path) -> list[str]:
    """What a wheel for Windows carries is loaded by llvmlite and onnxruntime there, without Python; what is wrong."""
    if not (wine() and shutil.which(MINGW)):
        return []
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    level = "x86-64-v3"
    asked = {TRIPLE_VARIABLE: "x86_64-pc-windows-msvc", "NUMBA_CPU_NAME": level, "NUMBA_CPU_FEATURES": ""}
    worker = [sys.executable, "-m", "onnx_backprop.ort_ops.workers", str(folder / level)]
    subprocess.run(worker, check=True, cwd=ROOT, env={**os.environ, **asked})
    source = ROOT / "ort_ops" / "runtime" / "operators.c"
    link = [MINGW.replace("g++", "gcc"), "-O2", "-Wall", "-Werror", "-shared"]
    subprocess.run([*link, "-o", folder / "operators.dll", source], check=True)
    try:
        print(windows_wheel(folder / "run", folder, level), flush=True)
    except AssertionError as e:
        return [f"what a wheel for Windows carries: {e}"]
    return []


if __name__ == "__main__":
    sys.exit(main())
