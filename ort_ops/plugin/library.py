"""A library from what a graph asks for: plans, machine code and tables, linked with `runtime.c`.

python -m onnx_backprop.ort_ops.plugin.library REQUESTS LIBRARY COMMAND … makes one for the processor that the
environment names (`compiler.machine`); COMMAND compiles and links C.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from onnx_backprop.opset.core.op import Attributes
from onnx_backprop.ort_ops.compiler.machine import MOST_PROCESSORS, PROCESSOR, matrix_tiles
from onnx_backprop.ort_ops.compiler.objects import Exported
from onnx_backprop.ort_ops.compiler.records import Record, layout
from onnx_backprop.ort_ops.elementwise import kernel as elementwise
from onnx_backprop.ort_ops.elementwise.program import Program, stage_of
from onnx_backprop.ort_ops.native_table import KERNELS, add_declared
from onnx_backprop.ort_ops.runtime import c_abi, call
from onnx_backprop.ort_ops.runtime.bridge import (
    ELEMENT_TYPES,
    NativeKernel,
    input_types,
    numbers_of,
    output_types,
    planned,
)
from onnx_backprop.ort_ops.runtime.scratch import POOL_SLOTS, RUNTIME_WORDS, Runtime
from onnx_backprop.ort_ops.runtime.stages import PlanHead

_RUNTIME = Path(__file__).with_name("runtime.c")
# Levels of x86-64 that ask for more than every such processor has, as `runtime.c` numbers them; 5: 4 and matrix_tiles.
_NEEDS = {"x86-64-v3": 3, "x86-64-v4": 4}


class _Tables:
    """The tables of a library as C, which grow by what is added."""

    def __init__(self) -> None:
        self.functions: dict[Exported, None] = {}
        self.lines: list[str] = []
        self._arrays: dict[tuple[str, str], str] = {}

    def function(self, exported: Exported) -> str:
        """A C expression for the address of a function."""
        self.functions |= dict.fromkeys((exported, *exported.shared))
        return f"ADDRESS(&{exported.linked_symbol})"

    def array(self, values: Sequence[object], kind: str = "word") -> str:
        """The name of an array of numbers or C expressions; equal ones are one."""
        text = ",".join(map(_number, values)) or "0"
        if (kind, text) not in self._arrays:
            self._arrays[kind, text] = name = f"table_{len(self._arrays)}"
            self.lines.append(f"static const {kind} {name}[] = {{{text}}};")
        return self._arrays[kind, text]

    def state(self, record: Record, **expressions: str) -> str:
        """The first entries of a `spec`: the words of a record, with C expressions in the place of some."""
        words: list[object] = [*record.words()]
        for name, text in expressions.items():
            words[layout(type(record))[name].first_word] = text
        return f"{self.array(words)}, {len(words)}"

    def plan(self, kernel: NativeKernel, attributes: Attributes, key: np.ndarray) -> tuple[str, int]:
        """The name of a plan, and how many words it has."""
        request, plan = planned(kernel, attributes, key)
        words: list[object] = plan.block(key, request.outputs, lambda _: 0).tolist()
        head = layout(PlanHead)
        first = int(str(words[head["stages"].first_word]))
        words[head["users"].first_word] = 0
        for n, (function, _) in enumerate(plan.stages):
            words[first + 2 * n] = self.function(function)
        return self.array(words), len(words)

    def spec(self, spec: Mapping[str, Any]) -> str:
        """An entry of `specs`."""
        if "program" in spec:
            program = Program.parse(spec["program"])
            state = elementwise.State(
                api=0, runtime=0, work=0, numbers=program.numbers, tensors=program.tensors,
                results=len(program.results), after=spec["after"], unequal=0,
            )  # fmt: skip
            work = self.function(stage_of(spec["program"]))
            unequal = f"ADDRESS({_text(elementwise.UNEQUAL.decode())})"
            return f"{{{self.state(state, runtime='ADDRESS(runtime)', work=work, unequal=unequal)}, 0, 0, 0}}"
        kernel = KERNELS[spec["op"]]
        attributes = Attributes(kernel.op, spec["attributes"])
        plans = [self.plan(kernel, attributes, np.array(key, np.int64)) for key in spec["keys"]]
        state = call.KernelState(api=0, spec=0, prepare=0, runtime=0, numbers=numbers_of(kernel.op))
        names, sizes = [name for name, _ in plans], [size for _, size in plans]
        kernel_state = self.state(state, prepare="ADDRESS(refuse)", runtime="ADDRESS(runtime)")
        return f"{{{kernel_state}, {self.array(names, 'word *const')}, {self.array(sizes)}, {len(plans)}}}"

    def runner(self, compute: Exported) -> str:
        """A C expression for a function that does what `runtime.c` does before a kernel runs, and runs it."""
        self.function(compute)
        symbol = compute.linked_symbol
        line = f"static void *run_{symbol}(void *k, void *context) {{ return run(k, context, (function){symbol}); }}"
        self.lines += [line] * (line not in self.lines)
        return f"(void *)run_{symbol}"

    def type(self, name: str, element_type: int) -> str:
        """An entry of `types`: an operator for one element type."""
        if name in KERNELS:
            op = KERNELS[name].op
            inputs, outputs = input_types(op, element_type), output_types(op, element_type)
            functions, variadic = (call.compute, call.destroy), 0
        else:
            inputs, outputs = elementwise.INPUTS, elementwise.OUTPUTS
            functions, variadic = (elementwise.compute, elementwise.destroy), 1
        tables = [[kind for kind, _ in inputs], [there for _, there in inputs], outputs]
        arrays = ", ".join(self.array(table, "int") for table in tables)
        compute, destroy = self.runner(functions[0]), f"(void *){self.function(functions[1])}"
        return f'{{"{name}", {arrays}, {len(inputs)}, {len(outputs)}, {variadic}, {compute}, {destroy}}}'


def _number(value: object) -> str:
    if not isinstance(value, int):
        return str(value)
    return f"{value}LL" if value > -(2**63) else "INT64_MIN"


def _text(text: str) -> str:
    """A text in C, whatever it holds."""
    plain = (chr(b) if 32 <= b < 127 and chr(b) not in '"\\?' else f"\\{b:03o}" for b in text.encode())
    return f'"{"".join(plain)}"'


def tables(domain: str, specs: Sequence[Mapping[str, Any]], lengths: str, target: str) -> tuple[str, _Tables]:
    """tables.h for `runtime.c`, and the functions that it names. lengths, target: for what the library says."""
    code = _Tables()
    entries = [code.spec(spec) for spec in specs]
    names = dict.fromkeys(spec["op"] for spec in specs)
    types = [code.type(name, kind) for name in names for kind in (ELEMENT_TYPES if name in KERNELS else (c_abi.FLOAT,))]
    texts = {"DOMAIN": domain, "LENGTHS": lengths, "TARGET": target}
    declared = [f"extern void {function.linked_symbol}(void);" for function in code.functions]
    content = [*(f"#define {name} {_text(text)}" for name, text in texts.items()), *declared, *code.lines]
    content.append(f"static const spec specs[] = {{{','.join(entries)}}};")
    content.append(f"static const operator_type types[] = {{{','.join(types)}}};")
    return "\n".join(content) + "\n", code


def constants() -> dict[str, int]:
    """What `runtime.c` takes for known of the records of compiled code: the words of fields."""
    fields = {
        "PLAN_NEXT": (PlanHead, "next"), "STATE_PLANS": (call.KernelState, "plans"),
        "STATE_COUNT": (call.KernelState, "count"), "QUESTION_STATE": (call.Question, "state"),
        "QUESTION_KEY": (call.Question, "key"), "QUESTION_PLAN": (call.Question, "plan"),
        "QUESTION_STATUS": (call.Question, "status"), "RUNTIME_MALLOC": (Runtime, "malloc"),
        "RUNTIME_FREE": (Runtime, "free"), "RUNTIME_NO_MEMORY": (Runtime, "no_memory"),
        "RUNTIME_THREADS": (Runtime, "threads"),
    }  # fmt: skip
    words = {name: layout(record)[field].first_word for name, (record, field) in fields.items()}
    words |= {"RUNTIME_WORDS": RUNTIME_WORDS, "POOL_SLOTS": POOL_SLOTS, "MOST_PROCESSORS": MOST_PROCESSORS}
    words["MAX_RANK"] = call.MAX_RANK
    return words | ({"NEEDS": _NEEDS[PROCESSOR] + matrix_tiles()} if PROCESSOR in _NEEDS else {})


def build(requests: Mapping[str, Any], path: Path, command: Sequence[str]) -> None:
    """Write a library. CalledProcessError where the command fails."""
    text, code = tables(requests["domain"], requests["specs"], requests["lengths"], requests["target"])
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "tables.h").write_text(text)
        objects = []
        for n, function in enumerate(code.functions):
            objects.append(root / f"{n}.o")
            objects[-1].write_bytes(function.linkable())
        defined = [f"-D{name}={value}" for name, value in constants().items()]
        options = ["-O2", "-fvisibility=hidden", *defined, f"-I{root}", "-o", str(path)]
        subprocess.run([*command, *options, str(_RUNTIME), *map(str, objects), "-lm"], check=True)


if __name__ == "__main__":
    asked = json.loads(Path(sys.argv[1]).read_text())
    for name in asked["modules"]:
        import_module(name)
    add_declared()
    build(asked, Path(sys.argv[2]), sys.argv[3:])
