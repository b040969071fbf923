"""Importing this package registers every gradient rule; one module a family.

May import `reverse` and opset.
"""

from importlib import import_module
from pkgutil import iter_modules

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
