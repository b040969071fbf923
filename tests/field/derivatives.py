"""jvp and hvp of exported architectures beside PyTorch's in float64, by the input and some weights.

`python -m tests.field.derivatives resnet18/torchscript bert_eager/dynamo`, in the environment of `make field`, prints the
largest error of the tangent and of the product with the Hessian of mean(y²), over the largest number of each.
"""

from __future__ import annotations

import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import ModelProto, numpy_helper, parser

import onnx_backprop as ob
from tests.field.sources import Source
from tests.field.torch_sources import exports

WEIGHTS, SEED = 6, 5
Arrays = dict[str, np.ndarray]


def scalar(model: ModelProto) -> ModelProto:
    """mean(y²) in the place of the outputs."""
    (y, *_) = (value.name for value in model.graph.output)
    text = f"g (float {y}) => (float[] mean_) {{ square_ = Mul({y}, {y}) mean_ = ReduceMean<keepdims = 0>(square_) }}"
    added, result = parser.parse_graph(text), ModelProto()
    result.CopyFrom(model)
    result.graph.node.extend(added.node)
    del result.graph.output[:]
    result.graph.output.extend(added.output)
    return result


def run(model: ModelProto, feeds: Arrays, names: list[str]) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    asked = {value.name for value in session.get_inputs()}
    answers = session.run(names, {name: array for name, array in feeds.items() if name in asked})
    return [np.asarray(value) for value in answers]


def in_torch(module: Any, feeds: Arrays, along: Arrays) -> tuple[np.ndarray, list[np.ndarray]]:
    """The tangent and the product with the Hessian, both by differentiating twice."""
    torch = import_module("torch")
    attention = import_module("torch.nn.attention")
    module = module.double()
    weights = {name: p.detach() for name, p in module.named_parameters()}
    given = {
        n: torch.from_numpy(a).double() if a.dtype == np.float32 else torch.from_numpy(a) for n, a in feeds.items()
    }
    given |= {name: weights[name] for name in along if name in weights}
    variables = [given[name].clone().requires_grad_() for name in along]
    values = given | dict(zip(along, variables, strict=True))
    v = [torch.from_numpy(a).double() for a in along.values()]

    def paired(grads: Any) -> Any:
        return sum((g * d).sum() for g, d in zip(grads, v, strict=True) if g is not None)

    def gradient(of: Any, seed: Any = None, by: Any = variables, **more: Any) -> Any:
        return torch.autograd.grad(of, by, seed, create_graph=True, allow_unused=True, **more)

    with attention.sdpa_kernel(attention.SDPBackend.MATH):
        y = torch.func.functional_call(
            module, {n: values.get(n, p) for n, p in weights.items()}, tuple(values[n] for n in feeds)
        )
        seed = torch.ones_like(y, requires_grad=True)
        (tangent,) = gradient(paired(gradient(y, seed)), by=[seed])
        product = gradient(paired(gradient((y * y).mean())))
    zeros = [np.zeros(a.shape) for a in along.values()]
    return tangent.detach().numpy(), [
        z if p is None else p.detach().numpy() for p, z in zip(product, zeros, strict=True)
    ]


def errors(source: Source) -> tuple[float, float]:
    """Of the tangent and of the product with the Hessian."""
    assert source.module is not None
    rng = np.random.default_rng(SEED)
    with tempfile.TemporaryDirectory() as folder:
        source.write(Path(folder) / "model.onnx")
        model = onnx.load(Path(folder) / "model.onnx")
    module, feeds = source.module(), source.feeds(np.random.default_rng(1))
    names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    values = {name: p.detach().numpy() for name, p in module.named_parameters() if names.count(name) == 1}
    owners = [id(p) for _, p in module.named_parameters(remove_duplicate=False)]
    tied = {name for name, owner in zip(names, owners, strict=True) if owners.count(owner) > 1}  # two in the file
    stored = {t.name: t for t in model.graph.initializer if t.name in values and t.name not in tied}
    # an exporter fuses a BatchNormalization into the weights before it, under their names
    same = [name for name, t in stored.items() if np.array_equal(numpy_helper.to_array(t), values[name])]
    picked = sorted(rng.choice(same, min(WEIGHTS, len(same)), replace=False).tolist())
    along = {
        name: rng.standard_normal(a.shape).astype(np.float32) for name, a in feeds.items() if a.dtype == np.float32
    }
    along |= {name: (0.1 * rng.standard_normal(values[name].shape)).astype(np.float32) for name in picked}
    tangent, product = in_torch(module, feeds, along)
    wrt, y = list(along), model.graph.output[0].name
    jvp, hvp = ob.jvp(model, wrt, [y]), ob.hvp(scalar(model), wrt, ["mean_"])
    got = run(jvp, feeds | {f"{name}_tangent": v for name, v in along.items()}, [f"{y}_tangent"])
    products = run(hvp, feeds | {f"{name}_direction": v for name, v in along.items()}, [f"{name}_hvp" for name in wrt])
    return _error(got, [tangent]), _error(products, product)


def _error(got: list[np.ndarray], want: list[np.ndarray]) -> float:
    largest = max(float(np.abs(b).max()) for b in want)
    return max(float(np.abs(a - b).max()) for a, b in zip(got, want, strict=True)) / largest


def main() -> None:
    """Print a line for each export that is named."""
    known = {source.name: source for source in exports()}
    for name in sys.argv[1:]:
        tangent, product = errors(known[name])
        print(f"{name}: jvp {tangent:.1e}, hvp {product:.1e}", flush=True)


if __name__ == "__main__":
    main()
