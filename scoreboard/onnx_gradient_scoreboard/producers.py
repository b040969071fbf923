"""Who is asked, what of, and where it says that it does this: a producer is only asked what it documents.

The name of an adapter is a module with `answer(question)`, of `adapters/` where it has no dot, and, behind a colon, an
argument of that function.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from onnx_gradient_scoreboard.questions import KINDS


@dataclass(frozen=True)
class Producer:
    """packages: what pip installs, "." being this repository; python: a version that it has wheels for.

    opsets: first and last; a case is asked at the last that it has there. passes: operators that it documents to do
    otherwise, with its reason. files: it documents to read files as exporters write them: asked by the first input,
    what may be a weight is an initializer. needs: a program that must be there besides.
    """

    name: str
    adapter: str
    packages: tuple[str, ...]
    asked: tuple[str, ...]
    basis: str
    python: str = "3.11"
    opsets: tuple[int, int] = (13, 23)
    passes: dict[str, str] = field(default_factory=dict)
    files: bool = False
    needs: str = ""
    version_of: str = ""

    @property
    def package(self) -> str:
        """What it is imported as."""
        name = self.adapter.partition(":")[0]
        return {"onnxruntime_training": "onnxruntime", "jax_onnx": "jaxonnxruntime"}.get(name, name)

    @property
    def distribution(self) -> str:
        """Whose version the table states."""
        return self.version_of or self.name


OURS = "docs/derivatives.md and docs/operators.md of onnx-backprop"
TORCH = ("torch", "onnx>=1.23")

PRODUCERS = {
    p.name: p
    for p in (
        Producer("onnx-backprop, native", "onnx_backprop:native", (".",), KINDS, OURS, version_of="onnx-backprop"),
        Producer("onnx-backprop, onnx", "onnx_backprop:onnx", (".",), KINDS, OURS, version_of="onnx-backprop"),
        Producer(
            "onnx-ad", "onnx_ad", ("onnx-ad==0.3.0", "onnxruntime>=1.31", "onnx>=1.23"),
            ("inputs", "symbolic", "jvp", "second"),
            "its README: J·v and Jᵀu by graph inputs, one composed with the other for second derivatives, symbolic "
            "lengths at run time",
        ),
        Producer(
            "onnxsim", "onnxsim", ("onnxsim==0.8.1", "onnxruntime>=1.31", "onnx>=1.23"), ("weights",),
            "the text of compile_training_loop: gradients by float32 initializers, static shapes, opset 17",
            opsets=(13, 17),
        ),
        Producer(
            "onnx2pytorch", "onnx2pytorch", ("onnx2pytorch==0.6.0", *TORCH), ("inputs", "symbolic", "jvp", "second"),
            "its README: a torch.nn.Module for all features of PyTorch, every schema revision; training of its weights "
            "is not claimed", files=True,
        ),
        Producer(
            "onnx2torch", "onnx2torch", ("onnx2torch==1.5.15", *TORCH), ("inputs", "symbolic", "jvp", "second"),
            "its README: a torch.nn.Module; its converters are registered up to opset 16", opsets=(13, 16), files=True,
        ),
        Producer(
            "tinygrad", "tinygrad", ("tinygrad==0.14.0", "onnx>=1.23"), ("inputs", "weights", "symbolic"),
            "its texts of OnnxRunner, which runs a model as tensors, and Tensor.gradient", needs="clang",
        ),
        Producer(
            "onnxruntime-training", "onnxruntime_training",
            ("onnxruntime-training-cpu==1.19.2", "onnx==1.16.2", "numpy<2", "torch"), ("weights", "symbolic"),
            "the text of generate_artifacts: gradients by initializers, opsets to 21", opsets=(13, 21),
            passes={
                "BatchNormalization": "always in training mode, by design",
                "Dropout": "always in training mode, by design",
            },
            version_of="onnxruntime-training-cpu",
        ),
        Producer(
            "jaxonnxruntime", "jax_onnx",
            ("jaxonnxruntime==0.3.0", "absl-py", "jax==0.4.30", "numpy<2.1", "onnx>=1.20"), KINDS,
            "its README: a JAX function of parameters and inputs for the JAX ecosystem; jax is of its time, the "
            "onnx that its metadata names ends at opset 17", opsets=(13, 17),
        ),
    )
}  # fmt: skip
