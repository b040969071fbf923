"""Long vectors and long declared lengths: converted in an address space that tables of them would not fit into."""

from __future__ import annotations

import subprocess
import sys

import pytest

LIMIT = 3 << 30  # bytes; a conversion takes about 1 GiB of addresses, what is not shared included

FORMS = {
    "products of a million floats": (
        "g (float[1000000] x) => (float y) {{ {body} }}",
        " ".join(f"a{n + 1} = Mul(a{n}, a{n})" for n in range(40)).replace("a0", "x").replace("a40 =", "y ="),
    ),
    "moves of a million floats": (
        "g (float[1000000] x) => (float y) <int64[1] z = {{0}}, int64[1] n = {{1000000}}> {{ {body} }}",
        " ".join(
            f"b{n} = Unsqueeze(a{n}, z) c{n} = Squeeze(b{n}, z) d{n} = Slice(c{n}, z, n) a{n + 1} = Add(d{n}, d{n})"
            for n in range(10)
        )
        .replace("(a0", "(x")
        .replace("a10 =", "y ="),
    ),
    "a Resize to 2^24 pixels": (
        "g (float[1,1,4] x) => (float y) <float[3] s = {{1.0, 1.0, 4194304.0}}> {{ {body} }}",
        'y = Resize<mode="linear">(x, "", s)',
    ),
    "a Resize from 2^24 pixels": (
        "g (float[1,1,16777216] x) => (float y) <int64[3] s = {{1, 1, 4}}> {{ {body} }}",
        'y = Resize<mode="cubic">(x, "", "", s)',
    ),
    "a scale for 2^31 features": (
        "g (float[L,2147483647] v, float[1] x) => (float[L,2147483647] y) {{ {body} }}",
        "y = LayerNormalization(v, x)",
    ),
    "a window of 2^30 pixels": (
        "g (float[1,1,L] x) => (float y) {{ {body} }}",
        "y = AveragePool<kernel_shape=[1073741824]>(x)",
    ),
    "a window of 2^60 pixels": (
        "g (float[1,1,L,M] x) => (float y) {{ {body} }}",
        "y = AveragePool<kernel_shape=[1073741824,1073741824]>(x)",
    ),
}

SCRIPT = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[2]),) * 2)
import onnx_backprop as ob
from onnx import parser
model = parser.parse_model('<ir_version: 9, opset_import: ["": 18]> ' + sys.argv[1])
try:
    print(len(ob.backward(model, wrt=["x"]).graph.node) > 0)
except ob.UnsupportedError as e:
    print(e)
"""


@pytest.mark.parametrize("case", FORMS)
def test_memory(case: str) -> None:
    text, body = FORMS[case]
    command = [sys.executable, "-c", SCRIPT, text.format(body=body), str(LIMIT)]
    answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert answer.returncode == 0, answer.stderr[-2000:]
    refused = case.startswith("a window")
    assert answer.stdout.strip() == "True" or (refused and "a window of [1073741824" in answer.stdout)
