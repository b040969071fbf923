"""A functional mock-up unit of FMI 3 around a model: simulators run it, and its derivatives are exact.

May import `converters` and `ort_ops`.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import tempfile
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree as Xml

import numpy as np
import onnxruntime
from onnx import ModelProto, TensorProto, ValueInfoProto, helper

from onnx_backprop.converters.derivatives.products import jvp, vjp
from onnx_backprop.converters.reverse.models.derivatives import derivatives
from onnx_backprop.opset.core.errors import InvalidArgumentError, KernelError
from onnx_backprop.opset.core.files import replacing
from onnx_backprop.opset.core.hints import near
from onnx_backprop.opset.core.mapped import serialized, whole
from onnx_backprop.opset.core.reading import load
from onnx_backprop.opset.graphs.edit import assign, copied
from onnx_backprop.opset.graphs.lazy import ir

_TYPES = {TensorProto.FLOAT: "Float32", TensorProto.DOUBLE: "Float64"}
_INPUT, _STATE, _OUTPUT, _DERIVATIVE = "isod"


def fmu(
    model: ModelProto | ir.Model | str | Path,
    path: str | Path,
    *,
    states: Mapping[str, str] | None = None,
    of: Sequence[str] | None = None,
    start: Mapping[str, np.ndarray | float] | None = None,
    lengths: Mapping[str, int] | None = None,
    target: str | Sequence[str] | None = None,
    runtime: bool = True,
) -> Path:
    """Write an FMU with exact derivatives of a function y = f(u), or of an equation ẋ = f(x, u), y = g(x, u).

        ob.fmu("model.onnx", "model.fmu", lengths={"batch": 1})

    The variables are the inputs and outputs of the model, under their names, also arrays, of type Float64 or Float32. A
    function is for Model Exchange and Co-Simulation, where outputs follow inputs at once; an equation is for Model
    Exchange. fmi3GetDirectionalDerivative and fmi3GetAdjointDerivative run the model's `jvp` and `vjp`.

    Args:
        states: {input: the output that is its derivative by time}.
        of: the outputs. Default: all.
        start: initial values. Default: zeros.
        lengths: of the symbols in the shapes of the inputs, as {"batch": 1}.
        target: "linux-x86_64", "windows-x86_64", "macos-x86_64", "linux-aarch64", "macos-arm64", one or several.
            Default: this one. Others need a compiler for them, or `pip install 'onnx-backprop[plugin]'`.
        runtime: put this system's onnxruntime into the FMU. It is found there, or where ONNXRUNTIME_LIB says.

    Returns the path. Errors: InvalidArgumentError for names and shapes that do not fit, lengths that are missing,
    values that are neither Float64 nor Float32; KernelError if nothing compiles for a target; what `jvp` raises.
    """
    from onnx_backprop.ort_ops.plugin import targets  # llvmlite

    asked = [target] if isinstance(target, str) else list(target or [_plain(targets.here())])
    binaries = {name: _binary(name) for name in asked}
    source = _bound(whole(load(model)), lengths or {})
    if of is not None:
        known = {value.name: value for value in source.graph.output}
        _check("of", of, known, "output")
        assign(source.graph.output, [known[name] for name in of])
    variables = _variables(source, dict(states or {}), start or {})
    wrt = [name for name, (kind, _) in variables.items() if kind in (_INPUT, _STATE)]
    outputs = [name for name in variables if name not in wrt]
    names, graphs = {}, {"f.onnx": source}
    for file, make in (("jvp.onnx", jvp), ("vjp.onnx", vjp)):
        graphs[file] = derived = make(source, wrt, outputs, inline=True)
        (derivative,) = derivatives(derived)[-1:]
        names[file] = {**derivative.seeds, **derivative.results}
        results = {value.name: value for value in derived.graph.output}
        assign(derived.graph.output, [results[name] for name in derivative.results.values()])
    files = {f"resources/{name}": serialized(whole(graph)) for name, graph in graphs.items()}
    files["resources/fmu.txt"] = _table(variables, *names.values()).encode()
    identifier = re.sub(r"\W", "_", Path(path).stem, flags=re.ASCII)
    identifier = identifier if identifier[:1].isalpha() else f"_{identifier}"
    for name, binary in binaries.items():
        suffix = targets.TARGETS[name].suffix
        files[f"binaries/{_platform(name)}/{identifier}.{suffix}"] = binary
    if runtime and (here := _plain(targets.here())) in asked:
        files |= _runtime(here)
    token = hashlib.blake2b(b"".join(files.values()), digest_size=16).hexdigest()
    files["modelDescription.xml"] = _description(Path(path).stem, identifier, token, variables, states or {})
    with replacing(path) as (file,), zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return Path(path)


def _plain(name: str) -> str:
    """A target without the level of its processors."""
    return re.sub(r"-(v\d|amx)$", "", name)


def _platform(name: str) -> str:
    """What FMI calls a target."""
    system, machine = name.split("-", 1)
    return f"{'aarch64' if machine == 'arm64' else machine}-{'darwin' if system == 'macos' else system}"


def _binary(name: str) -> bytes:
    from onnx_backprop.ort_ops.plugin import targets

    suffix = targets.checked(name).suffix
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, f"fmu.{suffix}")
        command = [*targets.linker(name), "-O2", str(Path(__file__).with_name("fmu.c")), "-o", str(library)]
        command += ["-ldl"] if name.startswith("linux") else []
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode or not library.is_file():
            raise KernelError(f"no binary for {name} was made: {done.stderr.strip()[-2000:]}")
        return library.read_bytes()


def _runtime(name: str) -> dict[str, bytes]:
    """onnxruntime's library, as it was installed, and its licence."""
    package = Path(onnxruntime.__file__).parent
    pattern, plain = {
        "linux": ("libonnxruntime.so.*", "libonnxruntime.so"),
        "macos": ("libonnxruntime.*.dylib", "libonnxruntime.dylib"),
        "windows": ("onnxruntime.dll", "onnxruntime.dll"),
    }[name.split("-")[0]]
    libraries = sorted(package.glob(f"capi/{pattern}"))
    if not libraries:
        raise KernelError(
            f"{package / 'capi'} has no {pattern} for the FMU. Give runtime=False, and run it with ONNXRUNTIME_LIB set"
        )
    files = {f"resources/{_platform(name)}/{plain}": libraries[0].read_bytes()}
    notices = [path for path in (package / "LICENSE", package / "ThirdPartyNotices.txt") if path.is_file()]
    return files | {f"documentation/licenses/onnxruntime/{path.name}": path.read_bytes() for path in notices}


def _check(argument: str, names: Sequence[str], known: Mapping[str, object], what: str) -> None:
    names = [names] if isinstance(names, str) else names  # whose letters are names hardly ever
    for name in names:
        if name not in known:
            listed = ", ".join(map(repr, known))
            raise InvalidArgumentError(
                f"expected names of {what}s ({listed}), got {name!r}{near(str(name), list(known))}", argument
            )


def _bound(model: ModelProto, lengths: Mapping[str, int]) -> ModelProto:
    """A copy whose inputs have no symbols."""
    bound = copied(model)
    weights = {tensor.name for tensor in bound.graph.initializer}
    for value in bound.graph.input:
        if value.name in weights:
            continue
        if not value.type.tensor_type.HasField("shape"):
            raise InvalidArgumentError(
                f"the model does not state the shape of its input {value.name!r}. State it there"
            )
        for axis, d in enumerate(value.type.tensor_type.shape.dim):
            if d.HasField("dim_value"):
                continue
            symbol = d.dim_param or f"{value.name}.{axis}"
            if symbol not in lengths:
                raise InvalidArgumentError(
                    f"expected the length of {symbol!r} (of {value.name!r}), since an FMU has fixed ones. Add it",
                    "lengths",
                )
            d.dim_value = lengths[symbol]
    for value in bound.graph.output:  # what they are is found by a run
        for d in value.type.tensor_type.shape.dim:
            if d.dim_param in lengths:
                d.dim_value = lengths[d.dim_param]
    return bound


def _variables(
    model: ModelProto, states: Mapping[str, str], start: Mapping[str, np.ndarray | float]
) -> dict[str, tuple[str, np.ndarray]]:
    """{name: (kind, value)}: states, inputs, derivatives of the states in their order, outputs, which a run finds."""
    weights = {tensor.name for tensor in model.graph.initializer}
    inputs = {value.name: value for value in model.graph.input if value.name not in weights}
    outputs = {value.name: value for value in model.graph.output}
    for what, values in (("input", inputs), ("output", outputs)):
        for name, value in values.items():
            if value.type.tensor_type.elem_type not in _TYPES:
                hint = "Leave it out by of=" if what == "output" else "Make a constant of it in the model"
                raise InvalidArgumentError(
                    f"the {what} {name!r} is {_type_name(value)}, an FMU has float and double. {hint}"
                )
    _check("states", list(states), inputs, "input")
    _check("states", list(states.values()), outputs, "output")
    if len({*states.values()}) < len(states):
        raise InvalidArgumentError(f"expected another derivative for each state, got {dict(states)!r}", "states")
    _check("start", list(start), inputs, "input")
    feeds = {}
    for name, value in inputs.items():
        kind = value.type.tensor_type
        shape = [d.dim_value for d in kind.shape.dim]
        given = np.asarray(start.get(name, 0), helper.tensor_dtype_to_np_dtype(kind.elem_type))
        try:
            feeds[name] = np.array(np.broadcast_to(given, shape))
        except ValueError as e:
            raise InvalidArgumentError(
                f"{name!r} has the shape {shape}, got one of {list(given.shape)}", "start"
            ) from e
    results = dict(zip(outputs, _run(model, outputs, feeds), strict=True))
    for x, dx in states.items():
        if feeds[x].shape != results[dx].shape or feeds[x].dtype != results[dx].dtype:
            raise InvalidArgumentError(
                f"{dx!r} is of {results[dx].dtype}{list(results[dx].shape)}, and the state {x!r} of "
                f"{feeds[x].dtype}{list(feeds[x].shape)}: a derivative is as its state",
                "states",
            )
    kinds = {**dict.fromkeys(states, _STATE), **dict.fromkeys(states.values(), _DERIVATIVE)}
    ordered = [*states, *(x for x in inputs if x not in states), *states.values()]
    ordered += [y for y in outputs if y not in states.values()]
    both = feeds | results
    return {name: (kinds.get(name, _INPUT if name in inputs else _OUTPUT), both[name]) for name in ordered}


def _run(model: ModelProto, outputs: Iterable[str], feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """What the model computes; InvalidArgumentError where onnxruntime as the FMU has it does not run it."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # the error says it
    try:
        opened = onnxruntime.InferenceSession(serialized(model), options, providers=["CPUExecutionProvider"])
        return [np.asarray(value) for value in opened.run(list(outputs), dict(feeds))]
    except Exception as e:  # onnxruntime's own kinds have no common base
        raise InvalidArgumentError(f"onnxruntime does not run the model for these lengths and starts: {e}") from e


def _type_name(value: ValueInfoProto) -> str:
    return TensorProto.DataType.Name(value.type.tensor_type.elem_type).lower()


def _numbers(value: np.ndarray) -> str:
    return " ".join(repr(float(x)) for x in value.ravel())


def _table(
    variables: Mapping[str, tuple[str, np.ndarray]], tangents: Mapping[str, str], gradients: Mapping[str, str]
) -> str:
    """What fmu.c reads: a number of variables, four lines for each, and starts of those that are set."""
    lines = [str(len(variables))]
    for name, (kind, value) in variables.items():
        element = helper.np_dtype_to_tensor_dtype(value.dtype)
        lines += [" ".join(map(str, (kind, element, value.ndim, *value.shape)))]
        lines += [name, tangents[name], gradients[name]]
    lines += [_numbers(value) for kind, value in variables.values() if kind in (_INPUT, _STATE)]
    return "\n".join([*lines, ""])


def _description(
    name: str, identifier: str, token: str, variables: Mapping[str, tuple[str, np.ndarray]], states: Mapping[str, str]
) -> bytes:
    """modelDescription.xml: value reference 0 is the time, the others count the variables."""
    about = {"fmiVersion": "3.0", "modelName": name, "instantiationToken": token, "generationTool": "onnx-backprop"}
    root = Xml.Element("fmiModelDescription", about, variableNamingConvention="flat")
    can = (
        "canGetAndSetFMUState",
        "canSerializeFMUState",
        "providesDirectionalDerivatives",
        "providesAdjointDerivatives",
    )
    Xml.SubElement(root, "ModelExchange", {"modelIdentifier": identifier, **dict.fromkeys(can, "true")})
    if not states:
        more = {**dict.fromkeys(can, "true"), "canHandleVariableCommunicationStepSize": "true"}
        Xml.SubElement(root, "CoSimulation", {"modelIdentifier": identifier, **more})
    categories = Xml.SubElement(root, "LogCategories")
    Xml.SubElement(categories, "Category", name="logStatusError")
    numbers = {variable: str(n) for n, variable in enumerate(variables, 1)}
    declared = Xml.SubElement(root, "ModelVariables")
    Xml.SubElement(
        declared,
        "Float64",
        name=_free("time", variables),
        valueReference="0",
        causality="independent",
        variability="continuous",
    )
    structure = Xml.SubElement(root, "ModelStructure")
    of = {dx: x for x, dx in states.items()}
    for variable, (kind, value) in variables.items():
        causality = {_INPUT: "input", _OUTPUT: "output"}.get(kind, "local")
        element = Xml.SubElement(
            declared,
            f"Float{8 * value.itemsize}",
            name=variable,
            valueReference=numbers[variable],
            causality=causality,
            variability="continuous",
        )
        if kind in (_INPUT, _STATE):
            element.set("start", _numbers(value))
        if kind == _STATE:
            element.set("initial", "exact")
        if kind == _DERIVATIVE:
            element.set("derivative", numbers[of[variable]])
        for length in value.shape:
            Xml.SubElement(element, "Dimension", start=str(length))
    kinds = {
        "Output": (_OUTPUT,),
        "ContinuousStateDerivative": (_DERIVATIVE,),
        "InitialUnknown": (_OUTPUT, _DERIVATIVE),
    }
    for tag, wanted in kinds.items():
        for variable, (kind, _) in variables.items():
            if kind in wanted:
                Xml.SubElement(structure, tag, valueReference=numbers[variable])
    Xml.indent(root)
    return Xml.tostring(root, encoding="UTF-8", xml_declaration=True)


def _free(name: str, taken: Mapping[str, object]) -> str:
    """A name that no variable has."""
    return name if name not in taken else _free(f"{name}_", taken)
