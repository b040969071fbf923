"""docs/operators.md, written from the schemas that are registered with onnx.

``python -m tests.docs.operators_page`` (or ``make docs``) in the root of a checkout writes the file.
"""

import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from onnx import AttributeProto, helper
from onnx.defs import OpSchema, get_schema

from onnx_backprop.opset.core.files import replacing
from onnx_backprop.opset.core.op import DOMAIN, OPSET_VERSION
from onnx_backprop.opset.operators.registry import OPS

PATH = Path("docs", "operators.md")
COMMAND = "python -m tests.docs.operators_page"

INTRODUCTION = f"""\
<!-- Generated from the operators' schemas by `{COMMAND}` (`make docs`). Do not edit. -->

# Operators

The reference of the operators that gradients use: domain `{DOMAIN}`, version {OPSET_VERSION}. Every operator accumulates in at
least float32 and rounds once to the type of its inputs. An empty optional list counts as absent. If specifications
contradict each other, [readings.md](readings.md) says what is computed.
"""

# Paragraphs that open with one of these are set off.
_LABEL = re.compile(r"^(Shapes|Units|Edge cases|Errors|Source)(?=[ :])")
# What is code already, and words that are a specification's names rather than English.
_NAME = re.compile(r"`[^`]*`|\bsrc\b|\b[A-Za-z]\w*_\w+")


def operators_markdown() -> str:
    """The whole page: one section per operator, in the order of `OPS`."""
    names = [op.name for op in OPS]
    sections = [INTRODUCTION, "\n".join(f"- [{name}](#{name.lower()})" for name in names) + "\n"]
    for op in OPS:
        schema = get_schema(op.name, OPSET_VERSION, DOMAIN)
        sections.append("\n".join(_section(schema, [a.name for a in op.attributes])))
    return "\n".join(sections)


def _section(schema: OpSchema, attributes: Sequence[str]) -> Iterator[str]:
    stated = [schema.attributes[name] for name in attributes]
    maths, *paragraphs = re.split(r"\n{2,}", (schema.doc or "").strip())
    yield f"## {schema.name}\n"
    yield f"```\n{maths}\n```\n"
    yield from (f"{_paragraph(p)}\n" for p in paragraphs)
    yield from _table(
        ("Attribute", "Type", "Default", "Meaning"),
        ((f"`{a.name}`", _type_of(a), _default(a), a.description) for a in stated),
    )
    for title, formals in (("Input", schema.inputs), ("Output", schema.outputs)):
        yield from _table(
            (title, "Type", "Meaning"),
            ((f"`{f.name}`" + _optional(f), f"`{f.type_str}`", f.description) for f in formals),
        )
    yield from _table(
        ("Type", "Stands for", "Meaning"),
        (
            (f"`{t.type_param_str}`", ", ".join(f"`{name}`" for name in t.allowed_type_strs), t.description)
            for t in schema.type_constraints
        ),
    )


def _paragraph(text: str) -> str:
    """Names as code, the label in bold."""
    return _LABEL.sub(r"**\1**", _code(text), count=1)


def _code(text: str) -> str:
    return _NAME.sub(lambda m: m[0] if m[0].startswith("`") else f"`{m[0]}`", text)


def _type_of(attribute: OpSchema.Attribute) -> str:
    return str(attribute.type).rpartition(".")[2].lower()


def _default(attribute: OpSchema.Attribute) -> str:
    if attribute.required:
        return "required"
    if attribute.default_value.type == AttributeProto.UNDEFINED:
        return "absent"
    value = helper.get_attribute_value(attribute.default_value)
    if isinstance(value, float):
        return f"`{np.float32(value)!s}`"  # as many digits as it has
    return f"`{value.decode() if isinstance(value, bytes) else value}`"


def _optional(formal: OpSchema.FormalParameter) -> str:
    return " (optional)" if formal.option == OpSchema.FormalParameterOption.Optional else ""


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield _row(head)
    yield _row(["---"] * len(head))
    for *cells, meaning in rows:
        yield _row([*cells, _code(meaning)])
    yield ""


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def write(path: Path) -> None:
    """Write the page under a temporary name first, so that nobody ever reads half of it."""
    with replacing(path) as (file,):
        file.write(operators_markdown().encode())


def main() -> None:
    """Write docs/operators.md in the current directory."""
    if not PATH.parent.is_dir():
        sys.exit(f"{COMMAND}: no directory {PATH.parent} here. Run it in the root of a checkout")
    write(PATH)


if __name__ == "__main__":
    main()
