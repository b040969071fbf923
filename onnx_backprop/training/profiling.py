"""Where the time of training steps goes: onnxruntime's profile of a few of them, added up by operator."""

import json
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnxruntime

from onnx_backprop.training.trainer import Trainer

WARM_UP = 2  # steps before those that count
_SETTINGS = (
    "intra_op_num_threads",
    "inter_op_num_threads",
    "execution_mode",
    "execution_order",
    "graph_optimization_level",
    "enable_cpu_mem_arena",
    "enable_mem_pattern",
    "enable_mem_reuse",
)


@dataclass(frozen=True)
class Timing:
    """An operator type or a node: calls and milliseconds in one step, and its share of all."""

    name: str
    calls: float
    milliseconds: float
    share: float


@dataclass(frozen=True)
class Profile:
    """Timings by operator and by node, the longest first, of one step on average."""

    steps: int
    operators: list[Timing]
    nodes: list[Timing]


def profile(trainer: Trainer, feeds: Mapping[str, Any], *, steps: int = 5) -> Profile:
    """Profile steps on one batch, in a session of their own; the trainer stays as it is.

    The session has the trainer's kernels, number of threads and level of optimisation.
    """
    with tempfile.TemporaryDirectory() as folder:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.enable_profiling = True
        options.profile_file_prefix = str(Path(folder) / "profile")
        given = trainer.session_options
        for name in _SETTINGS:
            setattr(options, name, getattr(given, name))
        twin = Trainer(trainer.graph, learning_rate=0.0, kernels=trainer.kernels, session_options=options)
        twin.set_state(trainer.held_by_all())  # without messages, since one rank may do this alone
        for _ in range(WARM_UP + steps):
            twin.step(feeds)
        events = json.loads(Path(twin.end_profiling()).read_text(encoding="utf-8"))
    runs = [e for e in events if e.get("name") == "model_run"]
    start = sorted(run["ts"] for run in runs)[-steps]
    kernels = [e for e in events if e.get("cat") == "Node" and e["name"].endswith("_kernel_time") and e["ts"] >= start]
    operators: dict[str, list[float]] = defaultdict(list)
    nodes: dict[str, list[float]] = defaultdict(list)
    for event in kernels:
        op_type = event["args"].get("op_name", "?")
        operators[op_type].append(event["dur"] / 1000)
        nodes[f"{event['name'].removesuffix('_kernel_time')} ({op_type})"].append(event["dur"] / 1000)
    return Profile(steps, _timings(operators, steps), _timings(nodes, steps))


def _timings(durations: Mapping[str, list[float]], steps: int) -> list[Timing]:
    total = sum(map(sum, durations.values())) or 1.0
    found = [Timing(n, len(v) / steps, sum(v) / steps, sum(v) / total) for n, v in durations.items()]
    return sorted(found, key=lambda timing: -timing.milliseconds)
