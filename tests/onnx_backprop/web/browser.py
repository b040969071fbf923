"""`make browser`: the pages of `onnx-backprop web` in Chromium, from training to download, and what goes wrong there.

    python -m tests.onnx_backprop.web.browser [--folder FOLDER]

Needs Chromium (apt-get install chromium; another one: CHROMIUM=/path) and the packages that `make browser` installs.
Downloads and screenshots stay in the folder, browser-run/ by default.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import matplotlib.image
import numpy as np
import onnx
import onnxruntime
from PIL import Image

import onnx_backprop as ob
from models.digits import build, digits
from models.graphs import Network
from onnx_backprop.command.main import main as command
from onnx_backprop.web.serve import server
from onnx_backprop.web.site import write_site
from tests.onnx_backprop.web.javascript import CASES, PACKAGES, RUNTIME, Arrays, node
from tests.support.lengths import fixed as fix_lengths

STEPS = 20
TABLE = """<ir_version: 10, opset_import: ["" : 18]>
  g (float[N,3] x) => (float[N,2] y) <float[3,2] w = {1,0,0,1,1,-1}, float[2] b = {0,0}> { z = MatMul (x, w) y = Add (z, b) }"""


def sites(folder: Path) -> dict[str, list[float]]:
    """Write the sites; Python's losses of those that are compared."""
    for name in ("pages", "downloads"):
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name).mkdir(parents=True)
    pages, rng = folder / "pages", np.random.default_rng(1)
    losses: dict[str, list[float]] = {}
    for name, case in CASES.items():
        rows = case.rows(np.random.default_rng(1))
        graph = ob.training_graph(case.build(), loss=case.loss, optimizer="adamw", inline=True)
        count = len(rows["image"])
        lengths = {n: (case.batch, *array.shape[1:]) for n, array in rows.items()}
        fixed = ob.training_graph(fix_lengths(case.build(), lengths), loss=case.loss, optimizer="adamw")
        for site, gpu in ((name, None), (f"{name}_webgpu", fixed)):
            about = {"train": count, "title": name, "batch": case.batch, "learning_rate": 1e-3, "runtime": RUNTIME}
            write_site(pages / site, graph, rows, fixed=gpu, **about)
        trainer = ob.Trainer(graph, learning_rate=1e-3, kernels=None)
        size = case.batch
        losses[name] = [trainer.step({n: a[k * size : (k + 1) * size] for n, a in rows.items()}) for k in range(STEPS)]
        losses[f"{name}_webgpu"] = losses[name]

    (x, y), (test_x, test_y) = digits()
    _web(
        pages / "digits",
        build(),
        {"image": x, "labels": y},
        "softmax_cross_entropy",
        {"image": test_x, "labels": test_y},
    )
    shutil.copytree(pages / "digits", pages / "labels")
    about = json.loads((pages / "labels" / "site.json").read_text())
    data = bytearray((pages / "labels" / "data.bin").read_bytes())
    place = about["data"]["arrays"]["labels"]["at"] + 8 * 700
    data[place : place + 8] = np.int64(11).tobytes()
    (pages / "labels" / "data.bin").write_bytes(data)
    about["id"] = "labels"
    (pages / "labels" / "site.json").write_text(json.dumps(about))

    table = onnx.parser.parse_model(TABLE)
    numbers = rng.standard_normal((200, 3)).astype(np.float32)
    _web(
        pages / "table", table, {"x": numbers, "labels": (numbers[:, 0] > 0).astype(np.int64)}, "softmax_cross_entropy"
    )
    net = Network("large", seed=0)  # 40 rows of 512 × 512 times 64 channels are 2.7 GB, and wasm has 4
    large = net.model("y", net.conv(net.relu(net.conv(net.input("x", 1), 64, kernel=1)), 1, kernel=1))
    pixels = rng.random((80, 1, 512, 512), np.float32)
    _web(pages / "memory", large, {"x": pixels, "target": pixels}, "mse")
    shutil.copytree(pages / "digits", pages / "broken")
    (pages / "broken" / "model" / "forward.onnx").unlink()

    matplotlib.image.imsave(folder / "downloads" / "digit.png", np.kron(test_x[0, 0], np.ones((8, 8))), cmap="gray")
    (folder / "downloads" / "no-picture.png").write_text("no picture")
    for name, lines in {
        "rows": "a,b,c\n1,0,0\n0,1,0\n",
        "answers": "1;0;0;0\n0;1;0;1\n",
        "text": "1,0,0\n1,zero,0\n",
        "wide": "1,0,0,0,0\n",
    }.items():
        (folder / "downloads" / f"{name}.csv").write_text(lines)
    return losses


def _web(site: Path, model: onnx.ModelProto, rows: Arrays, loss: str, evaluation: Arrays | None = None) -> None:
    """A site by the command."""
    onnx.save(model, f"{site}.onnx")
    np.savez(f"{site}.npz", **rows)
    arguments = [
        "web",
        f"{site}.onnx",
        "--data",
        f"{site}.npz",
        "--loss",
        loss,
        "--learning-rate",
        "3e-3",
        "-o",
        str(site),
    ]
    if evaluation is not None:
        np.savez(f"{site}.evaluation.npz", **evaluation)
        arguments += ["--evaluation", f"{site}.evaluation.npz"]
    if code := command([*arguments, "--runtime", str(RUNTIME), "--quiet"]):
        sys.exit(code)


def visited(folder: Path) -> dict[str, object]:
    """What the pages did in Chromium."""
    chromium = os.environ.get("CHROMIUM") or next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"))), None
    )
    if chromium is None:
        sys.exit(
            "make browser: there is no Chromium. apt-get install chromium, or name one: CHROMIUM=/path make browser"
        )
    servers = {path.name: server(path, port=0) for path in (folder / "pages").iterdir() if path.is_dir()}
    for running in servers.values():
        threading.Thread(target=running.serve_forever, daemon=True).start()
    urls = {name: f"http://127.0.0.1:{running.server_port}/" for name, running in servers.items()}
    puppeteer = PACKAGES / "puppeteer-core" / "lib" / "puppeteer" / "puppeteer-core.js"
    script = Path(__file__).with_name("browser.mjs")
    done = subprocess.run(
        [node(), str(script), str(puppeteer), chromium, str((folder / "downloads").resolve()), json.dumps(urls)],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    for running in servers.values():
        running.shutdown()
        running.server_close()
    if done.returncode:
        sys.exit("make browser: the visit has failed, see above")
    return json.loads(done.stdout)


def complaints(observed: dict, losses: dict[str, list[float]], folder: Path) -> list[str]:
    """What is not as it should be."""
    (_, _), (test_x, test_y) = digits()
    worst = {n: max(abs(a / b - 1) for a, b in zip(observed["losses"][n], losses[n], strict=False)) for n in losses}
    print("losses beside Python's:", ", ".join(f"{n} {w:.1e}" for n, w in worst.items()))
    trained = folder / "downloads" / "trained.onnx"
    onnx.checker.check_model(onnx.load(trained), full_check=True)
    run = onnxruntime.InferenceSession(trained, providers=["CPUExecutionProvider"]).run
    accuracy = float(np.mean(np.asarray(run(None, {"image": test_x})[0]).argmax(1) == test_y))
    print(f"downloaded after {observed['paused']} steps: {accuracy:.1%} of {len(test_y)} held-out digits")
    says = {
        "readySaid": r"Ready, with 1,400 rows to learn from, on (1 thread|\d threads)\.",
        "resumedSaid": rf"Going on from step {observed['paused']}, .*",
        "badRate": r"learningRate: expected 0 or more, got -1\.",
        "diverged": r"The training has stopped: the loss of step \d+ is (NaN|-?Infinity): its weights were not taken\. Lower the "
        rf"learning rate, which is 1e\+30\. It is back at step {observed['paused']}, which was kept\.",
        "secondTab": r"This training is open in another tab\. It continues here when .*",
        "lostWorker": r"The browser has ended what trains here, .* Step \d+ and all before it are kept\. Press “Go on”\.",
        "label": r"The training has stopped: 'labels': expected classes 0 … 9, got 11 at \d+\. Number the classes from 0\. "
        r"Step \d+ is kept\.",
        "memory": r"This browser has not enough memory for a step of 40 rows\. Step \d+ is kept\. "
        r"Take fewer rows a step\.",
        "broken": r"model/forward\.onnx could not be loaded \(404\)\. .*",
    }
    tests = {
        "losses within 1e-5": max(worst.values()) < 1e-5,
        "as many losses as steps": {len(observed["losses"][n]) for n in CASES} == {STEPS}
        and {len(observed["losses"][f"{n}_webgpu"]) for n in CASES} == {5},
        "accuracy of 95 %": accuracy >= 0.95,
        "threads": observed["isolated"],
        "a reload goes on": observed["afterReload"] >= observed["beforeReload"] > 10,
        "a paused training is where it was": observed["resumed"] == observed["paused"],
        "pictures": observed["pictures"][0].startswith(f"digit.png: class {test_y[0]} (")
        and observed["pictures"][1] == "no-picture.png: the browser cannot read this picture",
        "no sideways scrolling": observed["overflow"] <= 0,
        "everything has a name": not observed["nameless"],
        "two tabs": observed["secondDisabled"] and observed["takenOver"][0] == observed["takenOver"][1],
        "a lost worker loses two seconds at most": observed["foundAt"] > 0,
        "anew": observed["anew"] == 0,
        "a wrong label loses nothing": observed["labelAfter"] == observed["labelKept"],
        "no memory loses nothing": observed["memoryKept"] == observed["memoryStood"] >= 1,
        "tables": [bool(re.fullmatch(p, t)) for p, t in zip(
            [r"rows\.csv: row 1: class 0 \(.*", r"answers\.csv: 2 rows, loss [\d.]+, 100\.0 % right",
             r"text\.csv: row 2: expected a number, got “zero”", r"wide\.csv: row 1 has 5 numbers; expected 3, or 4 with.*"],
            observed["tables"], strict=True)] == [True] * 4,
        "no errors in the page": not observed["errors"],
    }  # fmt: skip
    wrong = [
        f"{name}: {observed[name]!r}"
        for name, pattern in says.items()
        if not re.fullmatch(pattern, str(observed[name]))
    ]
    return wrong + [f"not so: {name}" for name, holds in tests.items() if not holds]


def main() -> int:
    """Write, visit, judge; 1 where something is not as it should be."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.onnx_backprop.web.browser", description=str(__doc__).partition("\n")[0]
    )
    parser.add_argument("--folder", default="browser-run", help="(%(default)s)")
    folder = Path(parser.parse_args().folder)
    losses = sites(folder)
    observed = visited(folder)
    page = Image.open(folder / "downloads" / "page-1280.png").convert("RGB").crop((200, 0, 1080, 640))
    page.quantize(48, dither=Image.Dither.NONE).save(folder / "downloads" / "web.png", optimize=True)  # for README.md
    (folder / "found.json").write_text(json.dumps(observed, indent=1, ensure_ascii=False))
    wrong = complaints(observed, losses, folder)
    print(*wrong, sep="\n")
    print(f"{'not ' * bool(wrong)}as it should be; screenshots are in {folder / 'downloads'}: look at them")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
