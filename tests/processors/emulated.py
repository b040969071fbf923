"""An aarch64 processor under emulation: Debian's qemu, Debian's Python for arm64 and the wheels of what we depend on.

Everything lies in one folder and is kept there; apt has its own lists in it, so neither root nor an architecture added
to the system is needed, and nothing is installed.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
CPU = "neoverse-n1"  # NEON, vectors of four, 32 registers
TESTS_NEED = ("pytest", "hypothesis")  # what the sample imports
PYTHON = ("python3", "libstdc++6")
QEMU, EMULATOR = "qemu-user-static", "qemu-aarch64-static"
PLATFORMS = ("manylinux_2_34", "manylinux_2_31", "manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014")

# onnxruntime reads of what kind the cores are and ends where it finds another architecture's
CPUINFO = """processor\t: {}
BogoMIPS\t: 50.00
Features\t: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x3
CPU part\t: 0xd0c
CPU revision\t: 1

"""


class MissingError(Exception):
    """What this machine lacks; there is no run without it."""


def run(what: str, command: list[str], **options) -> str:
    """What a command prints; what it says where it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    if done.returncode:
        raise MissingError(f"{what} failed: {' '.join(command)}\n{done.stdout[-1000:]}{done.stderr[-3000:]}")
    return done.stdout


def require_tools() -> None:
    missing = [tool for tool in ("apt-get", "dpkg", "dpkg-deb", "tar") if shutil.which(tool) is None]
    if missing or not Path("/etc/apt").is_dir():
        raise MissingError(
            f"emulation of aarch64 needs Debian's package tools and sources (not found: {', '.join(missing) or '/etc/apt'})"
        )


class Apt:
    """Packages of one architecture, by lists of its own; of this system's suite, or of another one."""

    def __init__(self, folder: Path, architecture: str, suite: str = "") -> None:
        for name in ("lists/partial", "archives/partial"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / "status").write_text("")  # nothing is installed
        self._folder, self._architecture = folder, architecture
        settings = {
            "APT::Architecture": architecture,
            "APT::Architectures": architecture,
            "APT::Sandbox::User": "",  # which may not write here
            "Dir::State": folder,
            "Dir::State::lists": folder / "lists",
            "Dir::State::status": folder / "status",
            "Dir::Cache": folder,
            "Debug::NoLocking": 1,
        }
        if suite:
            (folder / "sources.list").write_text(f"deb http://deb.debian.org/debian {suite} main\n")
            settings |= {"Dir::Etc::sourcelist": folder / "sources.list", "Dir::Etc::sourceparts": "-"}
        self._options = [part for name, value in settings.items() for part in ("-o", f"{name}={value}")]
        self("update")

    def __call__(self, *arguments: str) -> str:
        what = f"apt-get for {self._architecture} (it needs Debian's archive and the network)"
        return run(what, ["apt-get", *self._options, "-q", *arguments], cwd=self._folder)

    def with_dependencies(self, *packages: str) -> list[str]:
        lines = self("--simulate", "--no-install-recommends", "install", *packages).splitlines()
        return [line.split()[1] for line in lines if line.startswith("Inst ")]

    def download(self, *packages: str) -> list[Path]:
        for package in self._folder.glob("*.deb"):
            package.unlink()
        self("download", *packages)
        return sorted(self._folder.glob("*.deb"))


def dependencies() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    tests = project["optional-dependencies"]["test"]
    return [*project["dependencies"], *(r for r in tests if r.startswith(TESTS_NEED) and "xdist" not in r)]


def _guest_python(root: Path) -> Path:
    """Of the guest: usr/bin/python3.11, whatever its version."""
    (python,) = (p for p in (root / "usr/bin").glob("python3.*") if p.name.removeprefix("python3.").isdigit())
    return python


def _make(folder: Path) -> None:
    """root/: the guest's system. packages/: its PYTHONPATH. qemu."""
    root, packages, wheels = folder / "root", folder / "packages", folder / "wheels"
    for old in (root, packages, wheels):
        shutil.rmtree(old, ignore_errors=True)
        old.mkdir(parents=True)
    host = run("dpkg", ["dpkg", "--print-architecture"]).strip()
    (package,) = Apt(folder / f"apt-{host}", host).download(QEMU)
    with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", str(package)], stdout=subprocess.PIPE) as tar:
        name = f"./usr/bin/{EMULATOR}"
        run("unpacking qemu", ["tar", "-x", "--strip-components=3", "-C", str(folder), name], stdin=tar.stdout)
    guest = Apt(folder / "apt-arm64", "arm64")
    for package in guest.download(*guest.with_dependencies(*PYTHON)):
        run("unpacking", ["dpkg-deb", "-x", str(package), str(root)])
    (root / "proc").mkdir()
    (root / "proc/cpuinfo").write_text("".join(CPUINFO.format(n) for n in range(os.cpu_count() or 1)))
    version = _guest_python(root).name.removeprefix("python")
    platforms = [part for name in PLATFORMS for part in ("--platform", f"{name}_aarch64")]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--only-binary=:all:"]
    given = [*platforms, "--python-version", version, "--dest", str(wheels), *dependencies()]
    run("downloading wheels for aarch64", [*pip, *given])
    for wheel in wheels.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(packages)
    shutil.rmtree(wheels)


def environment(folder: Path) -> tuple[list[str], dict[str, str]]:
    """(what runs Python there, its variables). Made on the first call, found there later."""
    stamp, recipe = folder / "made-of", Path(__file__).read_text() + repr(dependencies())
    digest = hashlib.sha256(recipe.encode()).hexdigest()
    if not stamp.exists() or stamp.read_text() != digest:
        require_tools()
        stamp.unlink(missing_ok=True)
        _make(folder)
        stamp.write_text(digest)
    root = folder / "root"
    libraries = ":".join(str(root / name / "aarch64-linux-gnu") for name in ("usr/lib", "lib"))
    command = [str(folder / EMULATOR), "-cpu", CPU, "-L", str(root)]
    command += ["-E", f"LD_LIBRARY_PATH={libraries}", str(_guest_python(root))]
    return command, {"PYTHONPATH": str(folder / "packages")}
