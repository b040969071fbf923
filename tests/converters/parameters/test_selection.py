"""Patterns over names of tensors and of modules."""

from __future__ import annotations

import pytest

import onnx_backprop as ob
from onnx_backprop.converters.prepare.selection import select, written_out

NAMES = {
    "val_1": ("val_1", "enc.0.weight", "enc.0", "enc"),
    "enc.0.bias": ("enc.0.bias", "enc.0", "enc"),
    "enc.2.weight": ("enc.2.weight", "enc.2", "enc"),
    "emb": ("emb", "emb.position.weight", "emb.position", "emb"),
    "emb.token.weight": ("emb.token.weight", "emb.token", "emb"),
    "w[0]": ("w[0]",),
}


@pytest.mark.parametrize(
    ("patterns", "chosen"),
    [
        (["enc.0.weight"], ["val_1"]),
        (["enc.0"], ["val_1", "enc.0.bias"]),
        (["enc.*"], ["val_1", "enc.0.bias", "enc.2.weight"]),
        (["*.0.*"], ["val_1", "enc.0.bias"]),
        (["emb"], ["emb", "emb.token.weight"]),  # a tensor has the name of the module in which another is
        (["w[0]"], ["w[0]"]),
        (["re:enc\\.\\d"], ["val_1", "enc.0.bias", "enc.2.weight"]),
        (["*.weight", "val_1"], ["val_1", "enc.2.weight", "emb", "emb.token.weight"]),
    ],
)
def test_chosen(patterns: list[str], chosen: list[str]) -> None:
    assert sorted(select("frozen", patterns, NAMES)) == sorted(chosen)


def test_what_is_written_out() -> None:
    """A module is not, though it have one tensor."""
    assert written_out(["enc.0.weight", "enc.2", "w[0]", "enc.2.*"], NAMES) == {"val_1", "w[0]"}


def test_a_tied_tensor_may_be_given_by_each_of_its_names() -> None:
    assert select("frozen", ["a.bias", "b.bias"], {"a.bias": ("a.bias", "a", "b.bias", "b")}) == ["a.bias"]


def test_a_part_of_a_module_is_told() -> None:
    names = {
        "enc.0.weight": ("enc.0.weight", "enc.0", "enc"),
        "enc.0.bias": ("enc.0.bias",),
        "b": ("b", "enc.0.b", "enc.0"),
    }
    with pytest.warns(ob.OnnxBackpropWarning, match=r"frozen: '\*c\.0\.[?]*' chooses a part .* leaves out 'b'"):
        assert select("frozen", ["*c.0.??????"], names) == ["enc.0.weight"]


@pytest.mark.parametrize(
    ("patterns", "sentence"),
    [
        (["enc.0.weigth"], "frozen: expected the name of an initializer, got 'enc.0.weigth'. Did you mean"),
        (["dec.*"], r"frozen: 'dec\.\*' matches no initializer"),
        (["emb.token.weight", "emb.token.weight"], "'emb.token.weight' is given twice"),
        (["re:("], "is not a regular expression"),
        ("enc", "expected a list of names"),
        ([], "at least one name"),
    ],
)
def test_refusals(patterns: list[str], sentence: str) -> None:
    with pytest.raises(ob.InvalidArgumentError, match=sentence):
        select("frozen", patterns, NAMES)
