"""One training on several machines: every rank has the whole model and a part of every batch, and gradients are summed.

`Trainer(graph, communicator=MPI.COMM_WORLD)` is the door, docs/distributed.md the manual.

May import `converters`, `ort_ops` and opset.
"""

from onnx_backprop.distributed.communicator import ALONE, Communicator, connected
from onnx_backprop.distributed.shards import Shard

__all__ = ["ALONE", "Communicator", "Shard", "connected"]
