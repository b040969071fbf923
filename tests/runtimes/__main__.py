"""Which file trains in which version of onnxruntime: docs/runtimes.md.

    python -m tests.runtimes [--versions 1.18 1.31] [--folder .runtimes]

Each version gets an environment of its own from the package index, kept for the next time. Exit code 1 when a file
does not do what it says of itself: inlined ones train everywhere, others from the version that their metadata name.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from typing import Any

import onnx
import onnxruntime

from onnx_backprop.opset.functions.half import NOTE, PATTERNS
from onnx_backprop.opset.functions.overloads import LEAST_ONNXRUNTIME, NEEDED, REQUIREMENT
from tests.runtimes.cases import CASES, FORMS, STEPS
from tests.runtimes.runner import LOADS

ROOT = Path(__file__).resolve().parents[2]
VERSIONS = ("1.18", "1.20", "1.22", "1.24", "1.26", "1.27", "1.28", "1.31")
REFUSED = f"needs {LEAST_ONNXRUNTIME}"
Cells = dict[tuple[int, str, str], dict[str, Any]]  # by case, form and version


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.runtimes", description="Train files in old versions of onnxruntime."
    )
    parser.add_argument("--versions", nargs="+", default=VERSIONS, help="of onnxruntime (default: all)")
    parser.add_argument("--folder", type=Path, default=ROOT / ".runtimes", help="for the environments (%(default)s)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        files = Path(name)
        for number, case in enumerate(CASES):
            case.write(files / str(number))
        cells: Cells = {}
        for version in arguments.versions:
            python = environment(arguments.folder / version, version)
            for number, case in enumerate(CASES):
                for form in FORMS:
                    cells[number, form, version] = result = trained(python, files / str(number), form)
                    print(f"{version}  {case.name}, {form}: {result['outcome']}", flush=True)
        wrong = [cell for cell, result in cells.items() if result["outcome"] not in expected(files, *cell)]
        text = page(files, cells, arguments.versions)
    if set(arguments.versions) >= set(VERSIONS):
        (ROOT / "docs" / "runtimes.md").write_text(text)
    for number, form, version in wrong:
        print(f"WRONG: {version}  {CASES[number].name}, {form}", flush=True)
    print(
        f"runtimes: {len(cells)} trainings in onnxruntime {', '.join(arguments.versions)}, {len(wrong)} not as the file says"
    )
    return 1 if wrong else 0


def environment(folder: Path, version: str) -> Path:
    """The interpreter of an environment that has a version of onnxruntime; made where it is missing."""
    python, done = folder / "bin" / "python", folder / "installed"
    if not done.is_file():
        print(f"installing onnxruntime {version} into {folder}", flush=True)
        venv.create(folder, clear=True, with_pip=True)
        numpy = "numpy<2" if version == "1.18" else "numpy"  # compiled for the first NumPy
        install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*install, f"onnxruntime=={version}.*", numpy], check=True)
        done.touch()
    return python


def trained(python: Path, folder: Path, form: str) -> dict[str, Any]:
    """What the runner says of a file."""
    script, files = ROOT / "tests" / "runtimes" / "runner.py", ("case.json", "case.npz")
    command = [python, script, folder / f"{form}.onnx", *(folder / name for name in files)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"outcome": f"the process ended with {done.returncode}: {done.stderr.strip()[-200:]}"}
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    result["outcome"] = REFUSED if NEEDED in result["outcome"] else result["outcome"][:200]
    return result


def expected(files: Path, number: int, form: str, version: str) -> list[str]:
    """What a file says of itself: that it trains, or what it needs."""
    model = onnx.load(files / str(number) / f"{form}.onnx")
    states = any(entry.key == REQUIREMENT for entry in model.metadata_props)
    older = tuple(map(int, version.split("."))) < tuple(map(int, LEAST_ONNXRUNTIME.split(".")))
    return [REFUSED] if states and older else ["trains"]


def page(files: Path, cells: Cells, versions: list[str]) -> str:
    """docs/runtimes.md."""
    lines = [
        "# Which onnxruntime trains which file",
        "",
        "For whoever deploys training graphs: which versions of onnxruntime train them, and what their metadata ask for.",
        "`make runtimes` writes this page. It installs every version of onnxruntime into its own environment and trains",
        f'{STEPS} steps there with NumPy and that onnxruntime alone. "trains": the relative difference of every loss from',
        f"that of {onnxruntime.__version__} for the default file is at most 0.0001, in float16 0.02.",
        "",
        "A default file keeps the nodes of our domain, and functions in the file compute them. A node calls its function by",
        "domain, operator and overload (ONNX IR version 10). Nodes of one operator that need different functions, because of",
        f"their attributes or shapes, call different overloads. onnxruntime distinguishes overloads from {LEAST_ONNXRUNTIME} on. Older",
        "versions, and onnx's reference evaluator, run the last one for every node: for Softmax along two axes of a square",
        "matrix that would be a wrong gradient without an error. So the last overload is a dummy that older versions refuse, with",
        f"`{NEEDED}` in the message, and the metadata say",
        f"`{REQUIREMENT}: >={LEAST_ONNXRUNTIME}`. If every operator has one function, the file has no overloads and no such",
        "entry, and trains everywhere.",
        "",
        "An inlined file (`inline=True`, `convert --inline`) has no functions and no nodes of our domain, and the lowest opset",
        "and IR version that its operators allow. Its kernels cannot be exchanged.",
        "",
        f"The metadata of a float16 or bfloat16 model have `{NOTE}`, names for",
        "`InferenceSession(path, disabled_optimizers=value.split())`. From 1.24 to 1.28 the first of these optimisers crashes",
        "if a float16 parameter has a default. From 1.24 to 1.32 the second crashes if a Transpose precedes a product; nodes that",
        "this package adds avoid that. Our sessions and trainers turn both off, but for float32 models neither.",
        f"`{PATTERNS}` asks for `SessionOptions.enable_mem_pattern = False` in 1.18, where from the second run on",
        "values of float16 graphs overlap, and the loss is NaN or a Reshape fails.",
        "",
        "| Training graph | File | " + " | ".join(versions) + " |",
        "|---|---|" + "---|" * len(versions),
    ]
    for number, case in enumerate(CASES):
        for form in FORMS:
            row = [cells[number, form, version]["outcome"] for version in versions]
            lines.append(f"| {case.name} | {form} | {' | '.join(row)} |")
    return "\n".join([*lines, "", *costs(files, cells, versions[-1])]) + "\n"


def costs(files: Path, cells: Cells, version: str) -> list[str]:
    """Sizes and the time to load, in the newest version."""
    lines = [
        f"Sizes, and the time to open a session in {version} (the best of {LOADS}, one thread):",
        "",
        "| Training graph | default, KB | inlined, KB | default, ms | inlined, ms | opset, IR version inlined |",
        "|---|---|---|---|---|---|",
    ]
    for number, case in enumerate(CASES):
        paths = [files / str(number) / f"{form}.onnx" for form in FORMS]
        sizes = [f"{path.stat().st_size / 1000:.0f}" for path in paths]
        times = [f"{1000 * cells[number, form, version]['seconds']:.0f}" for form in FORMS]
        model = onnx.load(paths[1])
        levels = f"{model.opset_import[0].version}, {model.ir_version}"
        lines.append(f"| {' | '.join([case.name, *sizes, *times, levels])} |")
    return lines


if __name__ == "__main__":
    sys.exit(main())
