"""Packages that bring operators: what their entry points "onnx_backprop" name is imported, and may register.

[project.entry-points.onnx_backprop]
acme = "acme_operators"  # a module that registers when it is imported, or "acme_operators:register", called so
"""

import logging
import threading
from importlib.metadata import entry_points
from types import ModuleType

GROUP = "onnx_backprop"
_logger = logging.getLogger("onnx_backprop")
_lock = threading.RLock()
_loaded: set[str] = set()


def load_extensions() -> None:
    """Import what installed packages bring, once per process; what fails is said in the log, and left out."""
    with _lock:
        if GROUP in _loaded:
            return
        _loaded.add(GROUP)  # before: what is imported asks for it again
        for point in entry_points(group=GROUP):
            package = point.dist.name if point.dist else "an unnamed package"
            try:
                extension = point.load()
                if not isinstance(extension, ModuleType):
                    extension()
                _logger.info("the extension %r of %s is loaded: %s", point.name, package, point.value)
            except Exception as e:  # noqa: BLE001 - whatever an extension does, the others and we go on
                _logger.warning(
                    "the extension %r of %s is left out, since loading %r failed: %s: %s",
                    *(point.name, package, point.value, type(e).__name__, e),
                )
