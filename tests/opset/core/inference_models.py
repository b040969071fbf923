"""Text models for tests of inference."""

from __future__ import annotations

from onnx import ModelProto, parser

CONV = """strides = [2, 1], pads_begin = [1, 0], pads_end = [1, 0], dilations = [1, 1], data_format = "NCX",
          weights_format = "OIX" """
CONVT = CONV.replace("OIX", "IOX")
RESAMPLE = """interpolation_mode = "LINEAR", scales = [2.0, 2.0], input_pixel_offsets = [0.5, 0.5],
              output_pixel_offsets = [-0.5, -0.5]"""


def model(signature: str, body: str, *, functions: str = "", imports: str = "") -> ModelProto:
    """A text model; `signature` is what stands between the graph's name and its nodes."""
    return parser.parse_model(f"""
        <ir_version: 10, opset_import: ["" : 18, "onnx_backprop" : 1 {imports}]>
        g {signature} {{ {body.replace("$", "onnx_backprop.")} }} {functions}""")


NCX = 'data_format = "NCX"'
INTERPOLATE = f'dx = $InterpolateBackward <mode = "linear", {NCX}>'
MAX_POOL = f"dx = $MaxPoolBackward <kernel = [2, 2], strides = [2, 2], pads_begin = [0, 0], pads_end = [0, 0], {NCX}>"
AVG_POOL = MAX_POOL.replace("Max", "Avg").replace("<", "<exclude_pad = 0, ")
DATA = f"dx = $ConvolutionBackwardData <{CONV}>"
