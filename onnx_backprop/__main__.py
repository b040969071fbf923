"""`python -m onnx_backprop` is the command `onnx-backprop`."""

import sys

from onnx_backprop.command.main import main

if __name__ == "__main__":
    sys.exit(main())
