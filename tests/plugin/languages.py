"""The programs of examples/, built: each is a command that takes FOLDER LIBRARY BATCHES STEPS RATE.

C++ needs this system's compiler, JavaScript Node and koffi from npm. Java and C# need onnxruntime's packages for them,
which `packages` takes from the npm package for Unity: its source in C#, and the classes and the bridge for Android, whose
C library `bionic.c` stands in for. `MissingError` says what is not there.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tarfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnxruntime

import onnx_backprop as ob
from tests.onnx_backprop.web import javascript

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
UNITY = "com.github.asus4.onnxruntime"
UNITY_VERSION = "0.4.9"  # has onnxruntime 1.29
# The source is in C# 8, Mono's compiler takes 7.3.
OLDER = (
    (r"\busing var ", "var "),
    (r"\bis null\b", "== null"),
    (r"\(static (\w+ =>)", r"(\1"),
    (r"\bunmanaged\b", "struct"),
    (r"(DisposableList<OrtValue>) sequenceOrtValues = new\(", r"\1 sequenceOrtValues = new \1("),
    (r"(?m)^( *)(\w+)\.Span\[(\w+)\] = ", r"\1var span = \2.Span; span[\3] = "),
    (r"if \(([A-Za-z.]+) is not (\w+)\)", r"if (!(\1 is \2))"),
    (r"(?m)^( *)(dimensions\[0\]) = (dimensions\[1\]) = (\w+);", r"\1\2 = \4; \3 = \4;"),
)


class MissingError(Exception):
    """What is not there to build or run a program."""


@dataclass(frozen=True)
class Program:
    """command: what comes before FOLDER. environment: in addition to this process's."""

    command: Sequence[str | Path]
    environment: dict[str, str] = field(default_factory=dict)

    def run(self, *arguments: object) -> str:
        """What it prints. An AssertionError with what it says where it fails."""
        words = [str(word) for word in (*self.command, *arguments)]
        environment = {**os.environ, **self.environment}
        done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
        assert done.returncode == 0, f"{words}: {done.returncode} {done.stderr[-3000:]}"
        return done.stdout


def require(*tools: str) -> None:
    """MissingError where one of the programs is not installed."""
    for tool in tools:
        if shutil.which(tool) is None:
            raise MissingError(f"there is no {tool}")


def cpp(folder: Path) -> Program:
    """train.cpp, on the onnxruntime of this process."""
    return Program([built(EXAMPLES / "cpp" / "train.cpp", folder)])


def built(source: Path, folder: Path) -> Path:
    """A program in C++ with the library of this process's onnxruntime."""
    require("c++")
    library, libraries = _onnxruntime(), folder / "lib"
    libraries.mkdir(parents=True, exist_ok=True)
    (libraries / "libonnxruntime.so.1").unlink(missing_ok=True)
    (libraries / "libonnxruntime.so.1").symlink_to(library)
    program = folder / source.stem
    options = ["-std=c++17", "-Wall", "-Werror", f"-I{EXAMPLES / 'cpp'}", "-pthread"]
    subprocess.run(["c++", *options, "-o", program, source, library, f"-Wl,-rpath,{libraries}"], check=True)
    return program


def _onnxruntime() -> Path:
    (library,) = Path(onnxruntime.__file__).parent.glob("capi/libonnxruntime.*.*")
    return library


def node(folder: Path) -> Program:
    """train.mjs, on the onnxruntime of this process."""
    if not (javascript.PACKAGES / "koffi").is_dir():
        raise MissingError("koffi is not in .npm/: `make test` gets it from the npm registry, which was not reached")
    script = folder / "train.mjs"
    shutil.copy(EXAMPLES / "javascript" / "train.mjs", script)
    if not (folder / "node_modules").exists():
        (folder / "node_modules").symlink_to(javascript.PACKAGES)
    return Program([javascript.node(), script, _onnxruntime()])


def packages(folder: Path) -> Path:
    """onnxruntime's package for Unity from npm, unpacked; kept in the folder."""
    require("npm")
    if not (folder / "package").is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        command = ["npm", "pack", "--silent", f"{UNITY}@{UNITY_VERSION}"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            raise MissingError(f"the npm registry gave no {UNITY}: {done.stderr.strip()[-300:]}")
        (archive,) = folder.glob("*.tgz")
        with tarfile.open(archive) as opened:
            opened.extractall(folder, filter="data")
        archive.unlink()
    return folder / "package"


def csharp(folder: Path, unity: Path) -> Program:
    """Train.cs, by Mono."""
    require("mcs", "mono")
    source, managed, program = folder / "source", folder / "Microsoft.ML.OnnxRuntime.dll", folder / "Train.exe"
    shutil.copytree(unity / "Runtime", source, dirs_exist_ok=True)
    for path in source.rglob("*.cs"):
        text = path.read_text()
        for new, old in OLDER:
            text = re.sub(new, old, text)
        path.write_text(text)
    compiler = ["mcs", "-langversion:latest", "-nowarn:1570,1573,1574,1587,1591"]
    library = [*compiler, "-unsafe", "-define:NETSTANDARD2_0", "-target:library", f"-out:{managed}"]
    subprocess.run([*library, f"-recurse:{source}/*.cs"], check=True, capture_output=True)
    example = EXAMPLES / "csharp" / "Train.cs"
    subprocess.run([*compiler, "-warnaserror", f"-r:{managed}", f"-out:{program}", example], check=True)
    shutil.copy(unity / "Plugins" / "Linux" / "x64" / "libonnxruntime.so", folder)
    return Program(["mono", program], {"LD_LIBRARY_PATH": str(folder)})


def java(folder: Path, unity: Path) -> Program:
    """Train.java, on the classes and the bridge for Android."""
    require("javac", "java", "cc")
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(unity / "Plugins" / "Android" / "onnxruntime.aar") as archive:
        archive.extract("classes.jar", folder)
        (folder / "libonnxruntime4j_jni.so").write_bytes(archive.read("jni/x86_64/libonnxruntime4j_jni.so"))
    for name in ("libonnxruntime.so", "libonnxruntime.so.1"):
        shutil.copy(unity / "Plugins" / "Linux" / "x64" / "libonnxruntime.so", folder / name)
    source, versions = Path(__file__).with_name("bionic.c"), folder / "versions"
    versions.write_text("LIBC { };\nVERS_1.29.0 { global: OrtSessionOptionsAppendExecutionProvider_Nnapi; };\n")
    options = ["-shared", "-fPIC", "-O1", "-fno-builtin", "-fno-stack-protector", f"-Wl,--version-script={versions}"]
    for name in ("libc.so", "libm.so", "libdl.so"):
        subprocess.run(["cc", *options, "-o", folder / name, source], check=True)
    example = EXAMPLES / "java" / "Train.java"
    jar = folder / "classes.jar"
    subprocess.run(["javac", "-Xlint:all", "-Werror", "-cp", jar, "-d", folder, example], check=True)
    command = ["java", f"-Donnxruntime.native.path={folder}", "-cp", f"{jar}:{folder}", "Train"]
    return Program(command, {"LD_LIBRARY_PATH": str(folder)})


def check(
    program: Program, compiled: Path, library: object, graph: ob.TrainingGraph, batches: dict[str, np.ndarray]
) -> None:
    """Train three steps, go on for three, evaluate and export: losses, state and model are those of `Trainer`.

    compiled: a folder of `compile_plugin`, which is written to. library: of it, or "-": then sums have another order.
    """
    rtol = 1e-5 if library == "-" else 1e-6
    trainer = ob.Trainer(graph, learning_rate=0.01)
    batch, losses = {}, []
    for first in (0, 3):
        parts = [batches[name][n].tobytes() for n in range(first, first + 3) for name in graph.inputs]
        (compiled / "batches").write_bytes(b"".join(parts))
        *lines, evaluation = program.run(compiled, library, compiled / "batches", 3, 0.01).splitlines()
        losses += map(float, lines)
    expected = []
    for n in range(6):
        batch = {name: array[n] for name, array in batches.items()}
        expected.append(trainer.step(batch))
    np.testing.assert_allclose(losses, expected, rtol=rtol)
    resumed = ob.Trainer(graph).load(compiled / "checkpoint.safetensors")
    assert resumed.steps == 6
    for name, array in trainer.state().items():
        np.testing.assert_allclose(resumed.state()[name], array, rtol=100 * rtol, atol=100 * rtol, err_msg=name)
    np.testing.assert_allclose(float(evaluation.split()[1]), resumed.evaluate(batch), rtol=1e-5)
    resumed.export(compiled / "expected.onnx")
    feeds = {name: batch[name] for name in graph.inputs if name in _inputs(compiled / "expected.onnx")}
    answers = [
        onnxruntime.InferenceSession(compiled / f"{name}.onnx").run(None, feeds)[0] for name in ("expected", "trained")
    ]
    np.testing.assert_array_equal(*answers)


def _inputs(model: Path) -> list[str]:
    return [value.name for value in onnxruntime.InferenceSession(model).get_inputs()]
