"""The blocks of the pages about JAX, PyMC and Flower run where these are (`make doors`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest

from tests.docs.blocks import ROOT, blocks, run
from tests.doors.federation import InProcess, accuracy, network
from tests.doors.models import weights_of


@pytest.mark.parametrize(("page", "library"), [("flower", "flwr.app"), ("jax", "jax"), ("pytensor", "pymc")])
@pytest.mark.filterwarnings("ignore")  # the libraries' own
def test_blocks_run(page: str, library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(library, reason=f"needs {library}: make doors")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": page}
    onnx.save(network(), "digits.onnx")
    code = [block for block in blocks(ROOT / "docs" / f"{page}.md") if block.language]
    assert code
    assert all(block.not_run for block in code)
    for block in code:
        run(block, names)
        if page == "flower":
            serve(names)
            assert trained(names["trainer"]) > 0.5


def serve(names: dict[str, Any]) -> None:
    """What a simulation does with a ServerApp and a ClientApp of the page, in this process."""
    grid = InProcess(names.get("secure", names["app"]))
    names["server"](grid, grid.contexts[1])


def trained(trainer: Any) -> float:
    """The accuracy of a trainer, which then begins anew."""
    score = accuracy(trainer)
    trainer.set_state(weights_of(network()))
    return score
