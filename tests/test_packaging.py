"""The wheel holds onnx_backprop/, what its command starts with and nothing else, and works where nothing of the checkout is."""

from __future__ import annotations

import email
import subprocess
import sys
import tarfile
import zipfile
from html.parser import HTMLParser
from pathlib import Path

import onnx
import pytest
from packaging.requirements import Requirement
from readme_renderer import markdown

from tools import release
from tools.archives import parts, tidy_sdist, tidy_wheel
from tools.links import absolute, project
from tools.release import copied, recipe

ROOT = Path(__file__).parent.parent
EPOCH = 1_700_000_000
ROOMS = ("opset", "ort_ops", "converters")


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """sdist and wheel, built as anybody would, from a copy without what git ignores."""
    source = copied(tmp_path_factory.mktemp("source"))
    subprocess.run([sys.executable, "-m", "build", str(source)], check=True, capture_output=True)
    return source / "dist"


def test_wheel_holds_the_package_and_nothing_else(archives: Path) -> None:
    (wheel,) = archives.glob("*.whl")
    names = {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n}
    expected = {str(path.relative_to(ROOT)) for path in (ROOT / "onnx_backprop").rglob("*.py")}
    for room in ROOMS:
        expected |= {f"onnx_backprop/{path.relative_to(ROOT)}" for path in (ROOT / room).rglob("*.py")}
    expected |= {
        f"onnx_backprop/web/{path.name}" for path in (ROOT / "onnx_backprop" / "web").iterdir() if path.is_file()
    }
    expected |= {
        "onnx_backprop/py.typed",
        "onnx_backprop/ort_ops/plugin/runtime.c",
        "onnx_backprop/fmi/fmu.c",
        "onnx_backprop_command.py",
    }
    assert names == expected


def test_source_archive_is_a_checkout(archives: Path) -> None:
    (sdist,) = archives.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"Makefile", "README.md", "LICENSE", "models/super_resolution.py", "onnx_backprop/opset/core/op.py"} <= names


def test_an_index_would_take_them(archives: Path) -> None:
    command = [sys.executable, "-m", "twine", "check", "--strict", *map(str, archives.iterdir())]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PASSED") == 2


class _Targets(HTMLParser):
    """What a page links to and shows."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:  # noqa: ARG002 - its name
        self.found += [value or "" for name, value in attrs if name in ("href", "src")]


def _long_description(wheel: Path) -> str:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        message = email.message_from_bytes(archive.read(name))
    assert message["Description-Content-Type"] == "text/markdown"
    return str(message.get_payload())


def test_the_page_of_an_index_has_no_relative_link(archives: Path) -> None:
    """Without an address of the repository a link is its words; the text is README's."""
    (wheel,) = archives.glob("*.whl")
    page = _long_description(wheel)
    assert page.startswith("# onnx-backprop\n")
    assert "| see everything in five minutes | tutorial, guide |" in page
    rendered = markdown.render(page)
    assert rendered, "not what an index renders"
    assert "<table>" in rendered
    assert [t for t in _Targets(rendered).found if not t.startswith(("https://", "#"))] == []


def test_links_lead_to_the_files_of_the_version() -> None:
    """With an address in [project.urls] every link of README leads to a file that is there."""
    about = {**project(), "urls": {"Repository": "https://host.example/owner/name/"}}
    start = f"https://host.example/owner/name/{{}}/v{about['version']}/"
    rendered = markdown.render(absolute((ROOT / "README.md").read_text("utf-8"), about)) or ""
    links = [target for target in _Targets(rendered).found if not target.startswith("#")]
    assert len(links) > 40
    assert f"{start.format('raw')}docs/web.png" in links
    for target in links:
        path = target.removeprefix(start.format("blob")).removeprefix(start.format("raw")).partition("#")[0]
        assert path != target
        assert (ROOT / path).is_file(), target
    kept = "[a](https://other.example/x) [b](#here) [c](mailto:a@b.example)"
    assert absolute(kept, about) == absolute(kept, {"version": "1"}) == kept
    assert absolute("[a](web.md#node)", about, "docs") == f"[a]({start.format('blob')}docs/web.md#node)"
    assert absolute("![a](b.png) [*c*](d.md)", {"version": "1"}) == " *c*"


def test_archives_do_not_tell_when_and_where_they_were_built(archives: Path, tmp_path: Path) -> None:
    (wheel,), (sdist,) = archives.glob("*.whl"), archives.glob("*.tar.gz")
    files = dict(parts(wheel.name, wheel.read_bytes()))
    with zipfile.ZipFile(tmp_path / wheel.name, "w") as other:
        for n, name in enumerate(reversed(files)):
            other.writestr(zipfile.ZipInfo(name, (1990 + n % 9, 1, 1, 0, 0, 0)), files[name])
    tidy = tidy_wheel(wheel, EPOCH)[wheel.name]
    assert tidy_wheel(tmp_path / wheel.name, EPOCH)[wheel.name] == tidy
    after = dict(parts(wheel.name, tidy))
    record = next(name for name in after if name.endswith("/RECORD"))
    assert {name: data for name, data in after.items() if name != record} == {n: files[n] for n in files if n != record}
    assert sorted(after[record].splitlines()) == sorted(files[record].splitlines())
    with tarfile.open(sdist) as old, tarfile.open(tmp_path / sdist.name, "w:gz") as other:
        for n, member in enumerate(reversed(old.getmembers())):
            member.mtime, member.uid, member.uname = n, n, "somebody"
            other.addfile(member, old.extractfile(member) if member.isfile() else None)
    tidy = tidy_sdist(sdist, EPOCH)[sdist.name]
    assert tidy_sdist(tmp_path / sdist.name, EPOCH)[sdist.name] == tidy
    assert dict(parts(sdist.name, tidy)) == dict(parts(sdist.name, sdist.read_bytes()))


def test_a_release_runs_the_command_that_it_installs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a virtual environment's Python; other systems' Pythons, which have none, run the module."""
    ran = []
    monkeypatch.setattr(release, "run", lambda *command, **_: ran.append(command) or "native")
    for name in ("onnx-backprop", "tuned.onnx"):
        (tmp_path / name).touch()
    release._first_steps([tmp_path / "python"], tmp_path, {})
    release._first_steps(["/usr/bin/wine64", "python.exe"], tmp_path, {})
    assert ran[1][:3] == (tmp_path / "onnx-backprop", "train", "model.onnx")
    assert ran[3][:5] == ("/usr/bin/wine64", "python.exe", "-m", "onnx_backprop", "train")


def test_one_version_everywhere() -> None:
    citation = (ROOT / "CITATION.cff").read_text("utf-8").splitlines()
    assert f"version: {project()['version']}" in citation
    assert f": {project()['version']}\n" in (ROOT / "CHANGELOG.md").read_text("utf-8")


@pytest.mark.parametrize(("system", "oldest"), [("linux", "0.15.2"), ("darwin", "0.15.2"), ("win32", "0.15.0")])
def test_each_system_asks_for_extensions_that_it_has_wheels_of(system: str, oldest: str) -> None:
    """The last release with wheels for Windows is 0.15.0; for Python 3.14 there is none."""
    asked = [Requirement(text) for text in project()["dependencies"] if text.startswith("onnxruntime-extensions")]
    for version in ("3.11", "3.12", "3.13", "3.14"):
        there = {"sys_platform": system, "python_version": version}
        chosen = [one for one in asked if one.marker is None or one.marker.evaluate(there)]
        assert [one.specifier.contains(oldest) for one in chosen] == [True] * (version != "3.14")


@pytest.mark.parametrize("repository", ["", "https://host.example/owner/name"])
def test_the_conda_recipe_asks_for_what_pyproject_asks_for(repository: str) -> None:
    about = {**project(), "urls": {"Repository": repository} if repository else {}}
    text = recipe(about, "source.tar.gz", b"source").decode()
    release = f"{repository}/releases/download/v{about['version']}/source.tar.gz"
    assert f"  {f'url: {release}' if repository else 'path: source.tar.gz'}\n  sha256: 41cf6794ba4200b8" in text
    assert "@" not in text
    plain = [one for one in about["dependencies"] if ";" not in one]
    assert len(plain) > 5
    assert [line.removeprefix("    - ") for line in text.splitlines() if line.removeprefix("    - ") in plain] == plain
    assert (f"  repository: {repository}" in text) == bool(repository)


def test_installed_wheel_converts_from_anywhere(archives: Path, tmp_path: Path) -> None:
    """Dependencies come from this environment, the package from the wheel alone."""
    (wheel,) = archives.glob("*.whl")
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 18]>
        g (float[N,2,H,W] x) => (float[N,3,H,W] y) <float[3,2,1,1] w = {1,2,3,4,5,6}> { y = Conv (x, w) }""")
    onnx.save(model, tmp_path / "model.onnx")
    script = f"""
import sys
sys.path.insert(0, {str(site)!r})
sys.meta_path = [f for f in sys.meta_path if "editable" not in getattr(f, "__module__", "") + repr(f)]
import onnx_backprop
assert onnx_backprop.__file__.startswith({str(site)!r}), onnx_backprop.__file__
from onnx_backprop.__main__ import main
sys.exit(main(["convert", "model.onnx", "-o", "training.onnx", "--loss", "mse"]))
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    graph = onnx.load(tmp_path / "training.onnx")
    assert [o.name for o in graph.graph.output] == ["loss", "y", "w_grad"]
