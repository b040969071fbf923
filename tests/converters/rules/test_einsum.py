"""Gradients of Einsum."""

from __future__ import annotations

from typing import Any

import pytest

import onnx_backprop as ob
from tests.support.gradient_checks import FLOAT64, VARIANTS, Case, build, case, check_cases

NAMES = "abcd"


def einsum(equation: str, *shapes: tuple[int, ...], **given: Any) -> Case:
    """Ranks under an ellipsis must be known."""
    operands = dict(zip(NAMES, shapes, strict=False))
    nodes = f'y = Einsum <equation = "{equation}"> ({", ".join(operands)})'
    refuses = ["unranked"] if "..." in equation else []
    return case(nodes, oracle=given.pop("oracle", FLOAT64), refuses=refuses, **operands, **given)


CASES = [
    # products, with and without an output
    *(einsum(f"ij,jk{output}", (2, 3), (3, 4)) for output in ("", "->ik", "->ki", "->i", "->k", "->", "->ijk", "->j")),
    einsum("bij,bjk->bik", (2, 2, 3), (2, 3, 2)),
    einsum("bhid,bhjd->bhij", (1, 2, 2, 3), (1, 2, 3, 3)),
    einsum(" i j , k j -> k i ", (2, 3), (4, 3)),
    einsum("iJ,Jk", (2, 3), (3, 2)),
    einsum("zA,Az", (2, 3), (3, 2)),
    einsum("bA,Ac", (2, 3), (3, 2)),
    einsum("i,j->ij", (2,), (3,)),
    einsum("i,i->", (3,), (3,)),
    einsum("i,i", (3,), (3,)),
    einsum("a,b,c->cab", (2,), (3,), (2,)),
    einsum("ij,jk,kl->il", (2, 3), (3, 2), (2, 2)),
    einsum("ij,ij,ij,i->j", (2, 3), (2, 3), (2, 3), (2,)),
    einsum("bn,anm,bm->ba", (2, 3), (2, 3, 2), (2, 2)),
    # one operand
    einsum("ij->ji", (2, 3)),
    einsum("ba", (2, 3)),
    *(einsum(f"ijk->{output}", (2, 3, 2)) for output in ("ki", "j", "", "kji")),
    # letters in one operand alone
    einsum("ij,k->k", (2, 3), (4,)),
    einsum("ij,kl->", (2, 3), (2, 2)),
    einsum("ij,kl->il", (2, 3), (2, 2)),
    # diagonals
    *(einsum(f"ii{output}", (3, 3)) for output in ("", "->i", "->")),
    *(einsum(f"iji->{output}", (2, 3, 2)) for output in ("ij", "ji", "j", "i", "")),
    einsum("iii->i", (2, 2, 2)),
    einsum("ijij->ij", (2, 3, 2, 3)),
    einsum("iijj->", (2, 2, 3, 3)),
    einsum("ii,ij->j", (3, 3), (3, 2)),
    einsum("iij,ijj->ij", (2, 2, 3), (2, 3, 3)),
    einsum("ii,jj->", (2, 2), (3, 3)),
    einsum("ii,i->i", (3, 3), (3,)),
    einsum("ij,kk->ij", (2, 3), (2, 2)),
    # lengths of 1 that are broadcast
    einsum("ij,ij->ij", (2, 3), (1, 3)),
    einsum("ij,ij->", (2, 3), (2, 1)),
    einsum("ij,jk->ik", (2, 1), (3, 4)),
    einsum("ij,j->i", (2, 3), (1,)),
    einsum("bij,bjk->bik", (3, 2, 3), (1, 3, 2)),
    einsum("ij,ij,ij->i", (2, 3), (1, 1), (2, 1)),
    einsum("i,i,j->j", (1,), (3,), (2,)),
    einsum("iij,j->i", (2, 2, 1), (3,)),
    einsum("ij,ik->jk", (1, 2), (1, 3)),
    # ellipses
    einsum("...ij->...ji", (2, 3, 4)),
    einsum("...", (2, 3)),
    einsum("i...->...", (2, 3, 2)),
    einsum("i...->...i", (2, 3)),
    einsum("...i->...i", (3,)),
    einsum("...ij,...jk->...ik", (2, 2, 3), (2, 3, 2)),
    einsum("...ij,...jk", (2, 2, 3), (2, 3, 2)),
    einsum("...ij,...jk->...ik", (2, 1, 2, 3), (1, 2, 3, 2)),
    einsum("...ij,jk->...ik", (2, 2, 3), (3, 2)),
    einsum("...i,i...->...", (2, 3), (3, 2)),
    einsum("i...j,j->...i", (2, 3, 2, 3), (3,)),
    einsum("i...i->...", (2, 3, 2)),
    einsum("A...a,a->...A", (2, 2, 3), (3,)),
    # no letters
    einsum(",ij->ij", (), (2, 3)),
    einsum("ij,->", (2, 3), ()),
    einsum(",->", (), ()),
    einsum(",", (), ()),
    einsum("i,,->i", (3,), (), ()),
    einsum("ii,", (2, 2), ()),
    # nothing
    einsum("ij,jk->ik", (0, 3), (3, 4)),
    einsum("ij,jk->ik", (2, 0), (0, 4)),
    # some inputs only, and one twice
    *(einsum("ij,jk->ik", (2, 3), (3, 4), wrt=[name]) for name in "ab"),
    case('y = Einsum <equation = "ij,jk->ik"> (a, a)', a=(3, 3)),
]


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradient(variant: str) -> None:
    check_cases(CASES, variant)


def test_operands_that_stretch_each_other() -> None:
    """Without static lengths: onnx's shape inference takes the last operand's for the result's, here a wrong one."""
    check_cases([einsum("ij,ij->ij", (2, 1), (1, 3))], "symbolic")


def test_static_shapes_need_no_shapes_at_run_time() -> None:
    model, _, wrt = build(einsum("bij,bjk->bik", (3, 2, 3), (1, 3, 2)), opset=18)
    nodes = [n.op_type for n in ob.backward(model, wrt=wrt).graph.node]
    assert nodes.count("Einsum") == 3
    assert not {"Shape", "Expand", "NonZero"} & set(nodes)


def test_a_rank_that_the_ellipsis_needs_is_asked_for() -> None:
    model, _, wrt = build(einsum("...ij,...jk->...ik", (2, 2, 3), (2, 3, 2)), opset=18, variant="unranked")
    with pytest.raises(ob.UnsupportedError, match=r"Einsum 'einsum_2': .*the rank of input 0 \('a'\).*ellipsis"):
        ob.backward(model, wrt=wrt)
