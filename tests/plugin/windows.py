"""Windows' own libraries under wine: what a wheel for Windows carries is loaded there, without Python."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import llvmlite
import onnxruntime

WINE, COMPILER = "wine64", "x86_64-w64-mingw32-gcc"


def wine() -> str:
    return shutil.which(WINE) or next((str(p) for p in [Path("/usr/lib/wine") / WINE] if p.is_file()), "")


def library_of(folder: Path, version: str, platform: str, package: str = "onnxruntime") -> Path:
    """The folder with the libraries of a package's wheel for another system."""
    library = folder / package / ("capi" if package == "onnxruntime" else "binding")
    if not library.is_dir():
        options = ["--quiet", "--no-deps", "--only-binary=:all:", "--python-version", "3.12", "--platform", platform]
        install = [sys.executable, "-m", "pip", "install", *options, "--upgrade", "--target", str(folder)]
        wanted = f"{package}=={version}" + (".*" if version.count(".") == 1 else "")
        subprocess.run([*install, wanted], check=True)
    return library


def windows_wheel(folder: Path, carried: Path, level: str) -> str:
    """A sentence: llvmlite's library loads the objects in carried/level, onnxruntime.dll takes an operator of operators.dll.

    AssertionError where one does not; the sentence says what is missing where nothing runs.
    """
    if not (wine() and shutil.which(COMPILER)):
        return f"{WINE} or {COMPILER} is not installed: what a wheel for Windows carries was not loaded"
    folder.mkdir(exist_ok=True)
    shutil.copy(library_of(folder, onnxruntime.__version__, "win_amd64") / "onnxruntime.dll", folder)
    library_of(folder, llvmlite.__version__, "win_amd64", "llvmlite")
    for library in (*folder.glob("llvmlite/binding/*.dll"), *folder.glob("llvmlite.libs/*.dll")):
        shutil.copy(library, folder)
    shutil.copy(carried / "operators.dll", folder)
    source, program = Path(__file__).with_name("windows.c"), folder / "windows.exe"
    subprocess.run([COMPILER, "-O2", "-Wall", "-Werror", "-o", program, source], check=True)
    command = [wine(), str(program), f"Z:{carried / level}", level]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    there = len(list((carried / level).glob("*.o")))
    assert (done.returncode, done.stdout.split()) == (0, [str(there)]), f"{done.stdout[-300:]} {done.stderr[-300:]}"
    return f"Windows' llvmlite loads the {there} objects for {level}, onnxruntime.dll takes operators"
