"""The front door: exactly the names of the reference, and none of them needs a runtime to be imported."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import typing
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import onnx
import pytest

import onnx_backprop as ob
from onnx_backprop import ort_ops
from onnx_backprop.opset.core import errors

PAGES = (Path(__file__).parents[1] / "docs" / "api").glob("*.md")
SIGNATURES = Path(__file__).parent / "data" / "public_names.txt"
DOCUMENTED = re.findall(r"^::: onnx_backprop\.([\w.]+)", "\n".join(page.read_text("utf-8") for page in PAGES), re.M)
ERRORS = {name for name, value in vars(errors).items() if isinstance(value, type)}
# the reference shows use_kernels where it stands, and inside other entries what they return
NAMES = sorted(
    {n for n in DOCUMENTED if "." not in n} | ERRORS | {"DOMAIN", "OPSET_VERSION", "__version__", "use_kernels"}
)


def test_public_names() -> None:
    assert sorted(ob.__all__) == dir(ob) == NAMES
    for name in NAMES:
        assert getattr(ob, name) is not None
    # a name that is defined here but not in __all__ would be public by accident
    public = {name for name in vars(ob) if not name.startswith("_")}
    root = Path(ob.__file__).parent
    submodules = {path.stem for path in (*root.iterdir(), *(root / "doors").iterdir())}
    assert public - set(NAMES) - submodules <= {
        "annotations",
        "Any",
        "TYPE_CHECKING",
        "import_module",
        "version",
        "PackageNotFoundError",
    }


@pytest.mark.parametrize(
    "module", [ob.artifacts, ob.callbacks, ob.losses, ob.metrics, ob.optimizers, ob.schedules], ids=lambda m: m.__name__
)
def test_modules_offer_their_own_names_alone(module: Any) -> None:
    """What completion shows; the classes of it, none is missing."""
    assert dir(module) == sorted(module.__all__)
    classes = {n for n, v in vars(module).items() if inspect.isclass(v) and v.__module__ == module.__name__}
    bases = {"Loss", "ElementLoss"}
    assert {n for n in classes if not n.startswith("_")} - bases <= set(dir(module))


def test_every_error_is_exported() -> None:
    assert {name for name in NAMES if name.endswith(("Error", "Warning"))} == ERRORS
    for name in ERRORS - {"OnnxBackpropWarning"}:
        assert issubclass(getattr(ob, name), ob.OnnxBackpropError)


def functions_of(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """A public function, or the public functions of a class or a module."""
    if inspect.ismodule(value):
        for inner in getattr(value, "__all__", [n for n in vars(value) if not n.startswith("_")]):
            if getattr(getattr(value, inner), "__module__", "").startswith("onnx_backprop"):
                yield from functions_of(f"{name}.{inner}", getattr(value, inner))
    elif inspect.isclass(value):
        yield name, value
        for inner, member in vars(value).items():
            function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
            if inspect.isfunction(function) and (inner == "__init__" or not inner.startswith("_")):
                yield f"{name}.{inner}", function
    elif callable(value):
        yield name, value


def test_types_are_there_for_whoever_asks() -> None:
    """What editors, notebooks and validators do: `typing.get_type_hints`."""
    functions = [pair for name in NAMES for pair in functions_of(name, getattr(ob, name))]
    assert len(functions) > 100
    for name, function in functions:
        hints = typing.get_type_hints(function)
        assert inspect.isclass(function) or "return" in hints or name.endswith("__init__"), name


def _called(default: Any) -> Any:
    return default.__name__ if inspect.isfunction(default) else default


def signatures() -> str:
    """A line for each public function and class: its parameters and their defaults, functions by their names."""
    pairs = {name: function for each in NAMES for name, function in functions_of(each, getattr(ob, each))}
    lines = []
    for name, function in sorted(pairs.items()):
        if not name.endswith(".__init__") and name not in ERRORS:
            given = inspect.signature(function).parameters.values()
            given = [p.replace(annotation=p.empty, default=_called(p.default)) for p in given]
            lines.append(f"{name}{inspect.Signature(given)}\n")
    return "".join(lines)


def test_signatures_are_those_that_were_promised() -> None:
    """`python -m tests.test_public_names` writes them anew; what changes for a caller stands in CHANGELOG.md too."""
    assert signatures().splitlines() == SIGNATURES.read_text("utf-8").splitlines()


def test_values() -> None:
    assert (ob.DOMAIN, ob.OPSET_VERSION) == ("onnx_backprop", 1)
    assert ob.__version__ == version("onnx-backprop")
    assert re.match(r"\d+\.\d+", ob.__version__)
    assert ob.session.__module__ == "onnx_backprop.providers.placed"
    assert ob.register_ops is ort_ops.register_ops


def test_unknown_name() -> None:
    with pytest.raises(
        AttributeError, match="module 'onnx_backprop' has no attribute 'sesion'. Did you mean 'session'?"
    ):
        ob.sesion  # noqa: B018


def test_supported_ops_exist() -> None:
    table = ob.supported_ops()
    assert table == sorted(set(table))
    for domain, op_type, since_version in table:
        if since_version == 0:  # of a rule that another test has registered
            assert domain not in ("", ob.DOMAIN)
            continue
        assert onnx.defs.get_schema(op_type, since_version, domain).since_version == since_version
    assert ("", "Conv", 22) in table
    assert table[0]._fields == ("domain", "op_type", "since_version")


LINEAR = """<ir_version: 10, opset_import: ["": 18]>
    m (float[2] x) => (float[2] y) <float[2] gain = {1.0, 2.0}> { y = Mul(x, gain) }"""
WITHOUT_RUNTIME = f"""
import sys
for name in ("onnxruntime", "onnxruntime_extensions", "numba"):
    sys.modules[name] = None
import onnx
import onnx_backprop as ob
model = onnx.parser.parse_model({LINEAR!r})
print(ob.training_graph(model, loss="mse").parameters)
for name in ("session", "register_ops", "Trainer"):
    try:
        getattr(ob, name)
    except ob.KernelError as e:
        print(e)
try:
    ob.check_gradients(model)
except ob.KernelError as e:
    print(e)
"""


def test_conversion_without_a_runtime() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_RUNTIME], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    parameters, session, register_ops, trainer, check = done.stdout.splitlines()
    assert parameters == "{'gain': 'gain_grad'}"
    assert session.startswith("onnx_backprop.session needs onnxruntime and onnxruntime-extensions")
    assert "pip install" in session
    assert register_ops.startswith("onnx_backprop.register_ops needs")
    assert trainer.startswith("onnx_backprop.Trainer needs")
    assert check.startswith("onnx_backprop.check_gradients needs")


def test_a_trainer_of_a_file_imports_no_converter(tmp_path: Path) -> None:
    """Rules, onnx_ir and its sympy are 42 MiB of memory."""
    ob.training_graph(onnx.parser.parse_model(LINEAR), loss="mse", optimizer="adamw").save(tmp_path / "graph.onnx")
    code = (
        "import sys, numpy as np, onnx_backprop as ob; t = ob.Trainer('graph.onnx'); "
        "t.step(x=np.ones(2, np.float32), target=np.ones(2, np.float32)); t.save('state.safetensors'); "
        "print([m for m in ('onnx_ir', 'sympy', 'onnx_backprop.converters.rules') if m in sys.modules]); "
        "t.export('trained.onnx'); print('onnx_ir' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.splitlines() == ["[]", "True"]


WITHOUT_NATIVE_KERNELS = """
import sys
for name in ("onnxruntime_extensions", "llvmlite"):
    sys.modules[name] = None
import numpy as np
import onnx, onnx_backprop as ob
from onnx_backprop.__main__ import main
model = onnx.parser.parse_model('<ir_version: 10, opset_import: ["": 18]> '
    'm (float[N,1,4,4] x) => (float[N,2,4,4] y) <float[2,1,1,1] w = {1.0, 2.0}> { y = Conv(x, w) }')
onnx.save(model, "model.onnx")
x = np.ones((4, 1, 4, 4), np.float32)
np.savez("data.npz", x=x, target=np.concatenate([x, x], 1))
assert main(["train", "model.onnx", "-o", "trained.onnx", "--data", "data.npz", "--loss", "mse", "--quiet"]) == 0
trainer = ob.Trainer(ob.training_graph(model, loss="mse", optimizer="sgd"), learning_rate=0.1)
print(trainer.kernels, trainer.step(x=x, target=np.concatenate([x, x], 1)))
square = onnx.parser.parse_model('<ir_version: 10, opset_import: ["": 18]> '
    'm (float[2] x) => (float y) { s = Mul(x, x) y = ReduceSum<keepdims = 0>(s) }')
print(ob.value_and_grad(square, ["x"])(np.array([1.0, 2.0])))
for refused in (lambda: ob.session(model, kernels="numpy"), lambda: ob.Trainer(trainer.graph, communicator=Two())):
    try:
        refused()
    except ob.KernelError as e:
        print(e)
"""


def test_standard_operators_run_where_the_native_kernels_have_no_wheels(tmp_path: Path) -> None:
    """As in Python 3.14, for which there is no onnxruntime-extensions, and on musl, for which there is no llvmlite."""
    two = "class Two:\n    rank, size, threads = 0, 2, 1\n    sum = broadcast = barrier = abort = print\n"
    done = subprocess.run(
        [sys.executable, "-c", two + WITHOUT_NATIVE_KERNELS], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    trained, value, *refusals = done.stdout.splitlines()
    assert trained == "onnx 0.5"
    assert value == "(5.0, array([2., 4.]))"
    assert [refusal.partition(":")[0] for refusal in refusals] == [
        'kernels="numpy" needs onnxruntime-extensions and llvmlite',
        "training on several ranks needs onnxruntime-extensions and llvmlite",
    ]
    assert done.stderr.count("cannot work here") == 1, "one warning"


def test_sessions_leave_the_rest_of_onnxruntime_extensions_alone() -> None:
    """Its package imports PyTorch where that is installed; who imports it afterwards gets all of it."""
    code = (
        "import sys, onnx_backprop as ob; ob.register_ops; "
        "from onnx_backprop.ort_ops.runtime import extensions; "
        "print([m for m in ('onnxruntime_extensions', 'torch') if m in sys.modules]); "
        "import onnxruntime_extensions as package; "
        "print(package.get_library_path() == extensions.get_library_path(), package.onnx_op == extensions.onnx_op, "
        "package.PyCustomOpDef is extensions.PyCustomOpDef, callable(package.gen_processing_models))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[]", "True True True True"]


def test_importing_loads_no_runtime() -> None:
    code = (
        "import sys, onnx_backprop; "
        "print([m for m in ('onnxruntime', 'onnxruntime_extensions', 'numba', 'onnx.reference') if m in sys.modules]); "
        "print(len(onnx_backprop.reference_ops()) == len(onnx_backprop.opset.OPS))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\nTrue\n"


RARE = (
    "onnx.reference",
    "html.entities",
    "onnx_ir.passes.common",
    "onnx_backprop.converters.reverse.batching.batch",
    "onnx_backprop.converters.reverse.loops.gradients",
    "onnx_backprop.converters.prepare.fused.attention",
    "onnx_backprop.converters.prepare.lengths.search",
    "onnx_backprop.opset.bodies.interpolation",
    "onnx_backprop.ort_ops.convolution.kernels",
)


def test_a_training_loads_what_its_model_needs() -> None:
    """8 MiB of a process, which has all of it in memory for good."""
    model = (
        '<ir_version: 10, opset_import: ["": 18]> m (float[b, 2] x) => (float[b, 2] y) <float[2, 2] w = {1, 2, 3, 4}>'
    )
    code = (
        "import sys, onnx, onnx_backprop as ob; "
        f"model = onnx.parser.parse_model({model + ' { y = MatMul(x, w) }'!r}); "
        "trainer = ob.Trainer(ob.training_graph(model, loss='mse', optimizer='sgd')); "
        "trainer.step(x=[[1, 2]], target=[[0, 0]]); "
        f"print([name for name in {RARE} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_an_import_of_the_runtime_is_interrupted_when_it_is_over() -> None:
    """pybind11 makes an ImportError of an exception in the middle, which would say that the runtime is missing."""
    script = """
import signal, sys
import onnx_backprop as ob

class Finder:
    def find_spec(self, name, *_):
        if name.startswith("onnxruntime.capi."):
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Finder())
try:
    ob.session
except KeyboardInterrupt:
    print("onnxruntime" in sys.modules, callable(ob.session))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "True True\n"), done.stderr


if __name__ == "__main__":
    SIGNATURES.write_text(signatures(), "utf-8")
