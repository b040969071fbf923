"""The networks of `networks.py` on each device, beside the CPU: the table of docs/devices.md.

    python -m tests.devices [--devices webgpu openvino] [--only ResNet-18] [--steps 20] [--hardware]

Behind all networks come the tests of providers. Exit code 1 where one fails, a loss is more than 1e-4 from the CPU's (1e-3
on OpenVINO), state was copied back in a step, or WebGPU does not run a network, or less than 97 % of a convolutional one.
If OpenVINO finds no device on this machine, its rows of the page stay as another machine wrote them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from tests.devices.adapter import environment
from tests.devices.networks import CASES, Case

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "devices.md"
BEGIN, END = "<!-- written by make devices -->", "<!-- up to here -->"
# OpenVINO rounds otherwise, so that small gradients are 1e-4 apart, which AdamW divides by themselves
MOST_UNLIKE, LEAST_SHARE = {"webgpu": 1e-4, "openvino": 1e-3}, 0.97
DEVICES, STEPS = ("webgpu", "openvino"), 20


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.devices", description=str(__doc__).partition("\n")[0])
    parser.add_argument("--devices", nargs="+", default=DEVICES, help="(default: %(default)s)")
    parser.add_argument("--only", nargs="+", default=[], help="names of networks (default: all)")
    parser.add_argument("--steps", type=int, default=STEPS, help="0: count the nodes, run none (%(default)s)")
    parser.add_argument("--hardware", action="store_true", help="the machine's own GPU, no adapter in software")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "devices", help="(%(default)s)")
    arguments = parser.parse_args()
    variables = os.environ | ({} if arguments.hardware else environment(arguments.folder))
    file = arguments.folder / ("hardware.json" if arguments.hardware else "results.json")
    results: dict[str, dict[str, Any]] = json.loads(file.read_text()) if file.is_file() else {}
    wrong, absent = 0, set[str]()
    for case in CASES:
        for device in arguments.devices:
            if device in absent or (arguments.only and case.name not in arguments.only):
                continue
            result = _in_a_process(case, device, arguments.steps, variables)
            if device != "webgpu" and "is not there" in result.get("error", ""):
                absent.add(device)
                print(f"{device}: {result['error']}", flush=True)
                continue
            known = {} if arguments.steps else results.get(case.name, {}).get(device, {})  # of losses, which stay
            results.setdefault(case.name, {})[device] = {**known, **result}
            faults = _faults(case, device, result)
            wrong += bool(faults)
            print(
                f"{device}  {case.name}: {_outcome(result)}{''.join(f'; WRONG: {fault}' for fault in faults)}",
                flush=True,
            )
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(results, indent=1))
            if not arguments.hardware:
                _write(results)
    if not arguments.only:
        tests = [sys.executable, "-m", "pytest", "-q", "tests/onnx_backprop/providers"]
        wrong += subprocess.run(tests, check=False, cwd=ROOT, env=variables).returncode != 0
    asked = [case.name for case in CASES if not arguments.only or case.name in arguments.only]
    used = [device for device in arguments.devices if device not in absent]
    print(
        f"devices: {len(asked)} networks on {' and '.join(used)}, {wrong} wrong"
        + "".join(f"; {device} is not on this machine" for device in sorted(absent))
    )
    return 1 if wrong or not asked else 0


def _in_a_process(case: Case, device: str, steps: int, variables: dict[str, str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.devices.beside", device, case.name, str(steps)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=variables)
    if done.returncode:
        return {
            "error": next(filter(None, reversed(done.stderr.strip().splitlines())), f"it ended with {done.returncode}")
        }
    return json.loads(done.stdout.splitlines()[-1])


def _faults(case: Case, device: str, result: dict[str, Any]) -> list[str]:
    if "error" in result:
        return ["it does not run"] if device == "webgpu" else []
    faults = []
    if "unlike" not in result:
        return faults
    if not result["unlike"] <= MOST_UNLIKE.get(device, 1e-4):
        faults.append("other losses")
    if result["copied"]:
        faults.append(f"{result['copied']} tensors of the state were copied back in the steps")
    if device == "webgpu" and case.convolutional and result["on_device"] < LEAST_SHARE * result["nodes"]:
        faults.append("too little runs on the device")
    return faults


def _outcome(result: dict[str, Any]) -> str:
    if "error" in result:
        return f"does not run: {result['error'][:300]}"
    share = f"{result['on_device']:,} of {result['nodes']:,} ({100 * result['on_device'] / result['nodes']:.1f} %)"
    return f"{share}, losses within {result['unlike']:.0e}" if "unlike" in result else share


def _write(results: dict[str, dict[str, Any]]) -> None:
    before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
    written, _, behind = rest.partition(END)
    lines = ["| Network | Device | Nodes there | Losses within | On the CPU |", "|---|---|---|---|---|"]
    for case in CASES:
        about = f", {case.about}" if case.about else ""
        for device in DEVICES:
            result = results.get(case.name, {}).get(device)
            start = f"| {case.name}{about} | {device} |"
            if result is None:
                old = (line for line in written.splitlines() if line.startswith(start))
                lines.append(next(old, f"{start} - | not run | |"))
                continue
            if "error" in result:
                lines.append(f"{start} - | - | does not run: {result['error'][:200]} |")
                continue
            share = (
                f"{result['on_device']:,} of {result['nodes']:,}, {100 * result['on_device'] / result['nodes']:.1f} %"
            )
            within = f"{result['unlike']:.0e}" if "unlike" in result else "not run to the end"
            within += "" if result.get("steps", STEPS) == STEPS else f", steps: {result['steps']}"
            lines.append(f"{start} {share} | {within} | {_why(result)} |")
    PAGE.write_text("\n".join([f"{before}{BEGIN}", "", *lines, "", f"{END}{behind}"]), "utf-8")


def _why(result: dict[str, Any]) -> str:
    by_reason: dict[str, Counter[str]] = {}
    for operator, reason in result["elsewhere"]:
        by_reason.setdefault(reason, Counter())[operator] += 1
    parts = [
        f"{', '.join(f'{n} {op}' if n > 1 else op for op, n in sorted(counted.items()))}: {reason}"
        for reason, counted in by_reason.items()
    ]
    return "; ".join(parts) or "nothing"


if __name__ == "__main__":
    sys.exit(main())
