"""Where the time of training steps goes: onnxruntime's profile of a few of them, added up by operator."""

import json
import re
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
from onnx import GraphProto

from onnx_backprop.opset.graphs.walk import reads
from onnx_backprop.training.trainer import Trainer

WARM_UP = 2  # steps before those that count
_SUFFIX = "_kernel_time"
_NOTHING = re.compile(r"(?!)")
_UNNAMED = re.compile(r"^_inlfunc_|_token_\d+")
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

    The session has the trainer's kernels, number of threads and level of optimisation. The time of a node is its own:
    that of the nodes inside an If or a Loop counts for those, by operator, and for the outermost, by node. What
    onnxruntime makes of a node of the graph, a function's body or a fusion, has the name of the former.
    """
    with tempfile.TemporaryDirectory() as folder:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.enable_profiling = True
        options.profile_file_prefix = str(Path(folder) / "profile")
        options.optimized_model_filepath = str(Path(folder) / "optimized.onnx")
        options.add_session_config_entry("session.optimized_model_external_initializers_file_name", "weights")
        given = trainer.session_options
        for name in _SETTINGS:
            setattr(options, name, getattr(given, name))
        twin = Trainer(
            trainer.graph, learning_rate=0.0, kernels=trainer.kernels, session_options=options, **trainer.where
        )
        twin.set_state(trainer.held_by_all())  # without messages, since one rank may do this alone
        for _ in range(WARM_UP + steps):
            twin.step(feeds)
        events = json.loads(Path(twin.end_profiling()).read_text(encoding="utf-8"))
        optimized = onnx.load(options.optimized_model_filepath, load_external_data=False)
    names = _names(optimized.graph, trainer.graph.model.graph)
    runs = [e for e in events if e.get("name") == "model_run"]
    start = sorted(run["ts"] for run in runs)[-steps]
    kernels = [e for e in events if e.get("cat") == "Node" and e["name"].endswith(_SUFFIX) and e["ts"] >= start]
    operators: dict[str, list[float]] = defaultdict(list)
    nodes: dict[str, list[float]] = defaultdict(list)
    for event, self_time, outermost in _self_times(kernels):
        operators[event["args"].get("op_name", "?")].append(self_time)
        name = outermost["name"].removesuffix(_SUFFIX)
        nodes[names.get(name, _UNNAMED.sub("", name))].append(self_time)
    return Profile(steps, _timings(operators, steps), _timings(nodes, steps))


def _self_times(events: Iterable[dict[str, Any]]) -> list[tuple[dict[str, Any], float, dict[str, Any]]]:
    """Each event with its milliseconds less those of the events inside it, and the outermost around it."""
    times: list[tuple[dict[str, Any], float, dict[str, Any]]] = []
    around: dict[int, list[int]] = defaultdict(list)  # of each thread, as places in `times`
    for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
        stack = around[event["tid"]]
        while stack and times[stack[-1]][0]["ts"] + times[stack[-1]][0]["dur"] <= event["ts"]:
            stack.pop()
        if stack:
            outer, self_time, outermost = times[stack[-1]]
            times[stack[-1]] = outer, self_time - event["dur"] / 1000, outermost
        stack.append(len(times))
        times.append((event, event["dur"] / 1000, times[stack[0]][0] if len(stack) > 1 else event))
    return times


def _names(optimized: GraphProto, graph: GraphProto) -> dict[str, str]:
    """The node of the graph that each node which runs is a part of, by name.

    What onnxruntime writes out of one call of a function shares the beginning of its name, which has the operator: it
    is that of the node of this operator whose results, or else inputs, it has. Other nodes that it adds, such as those
    that change a layout, belong to the first node that reads what they lead to.
    """
    originals = {node.name for node in graph.node}
    called = "|".join(sorted({re.escape(node.op_type) for node in graph.node if node.domain}, key=len, reverse=True))
    written = re.compile(rf"_inlfunc_({called})(?:_token_\d+)?_") if called else _NOTHING
    around: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)  # operator, value -> nodes that have it
    for node in graph.node:
        for value in node.input:
            around[node.op_type, value][node.name] += 1
        for value in node.output:
            around[node.op_type, value][node.name] += len(graph.node)
    calls: dict[str, Counter[str]] = defaultdict(Counter)
    for node in optimized.node:
        if call := written.match(node.name):
            for value in (*reads(node), *node.output):
                calls[call[0]].update(around.get((call[1], value), {}))
    owners: dict[str, str] = {}
    leads_to = {value: node.name for node in graph.node for value in node.output}
    for node in reversed(optimized.node):
        call = written.match(node.name)
        if node.name in originals:
            owners[node.name] = node.name
        elif call and calls[call[0]]:
            owners[node.name] = calls[call[0]].most_common(1)[0][0]
        elif owner := next((leads_to[value] for value in node.output if value in leads_to), None):
            owners[node.name] = owner
        leads_to.update(dict.fromkeys(reads(node), owners.get(node.name, "")))
    return {name: owner for name, owner in owners.items() if owner}


def _timings(durations: Mapping[str, list[float]], steps: int) -> list[Timing]:
    total = sum(map(sum, durations.values())) or 1.0
    timings = [Timing(n, len(v) / steps, sum(v) / steps, sum(v) / total) for n, v in durations.items()]
    return sorted(timings, key=lambda timing: -timing.milliseconds)
