"""onnx_ir, imported when something of it is first asked for, and without sympy until something needs that.

sympy is 33 MiB and 0.1 s. onnx_ir computes with it where somebody adds lengths as formulas, which no conversion does.
"""

import sys
import threading
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    import onnx_ir as ir
else:

    class _Later:
        """In the place of a module: imports it when something of it is first asked for."""

        def __init__(self, module: str) -> None:
            self._module = module

        def __getattr__(self, name: str) -> Any:
            vars(self)[name] = value = getattr(import_module(self._module), name)
            return value

    ir = _Later("onnx_ir")

    class _WithoutSympy:
        """Finds onnx_ir, whose modules then have `_Later` for sympy; `sys.modules` has it meanwhile alone."""

        MODULES = ("sympy", "onnx_ir._symbolic_shapes")  # the second makes a table of sympy's functions

        @classmethod
        def find_spec(cls, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:  # noqa: ARG003
            # Another thread could import sympy meanwhile, and would be given the wrong one.
            if name != "onnx_ir" or "sympy" in sys.modules or threading.active_count() > 1:
                return None
            spec = PathFinder.find_spec(name)
            if spec is None or spec.loader is None:
                return None
            execute = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                sys.modules.update({later: _Later(later) for later in cls.MODULES})
                try:
                    execute(module)
                finally:
                    for later in cls.MODULES:
                        del sys.modules[later]

            spec.loader.exec_module = exec_module
            return spec

    sys.meta_path.insert(0, _WithoutSympy)


def is_ir_model(model: object) -> "TypeGuard[ir.Model]":
    """Whether this is an onnx_ir.Model, of which there is none where nobody has imported onnx_ir."""
    return "onnx_ir" in sys.modules and isinstance(model, ir.Model)
