"""What the server of processes imports once, so that a process of a subject starts in no time."""

from importlib import import_module

from tests.fidelity import case, catalog  # noqa: F401 - this loads torch and the rest
from tests.field.torch_sources import torchvision

torchvision()
for _name in ("transformers", "onnxscript"):
    import_module(_name)
