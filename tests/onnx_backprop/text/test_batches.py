"""Rows of tokens: windows, padding, packing, what is learned; and conversations as text. None of it needs tokenizers."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

import onnx_backprop as ob
from onnx_backprop import text
from onnx_backprop.command.commands.finetune import COMMAND
from onnx_backprop.text import IGNORED, TEMPLATES, TextBatches, Tokens, windows


def tokens(*ids: int, prompt: int = 0) -> Tokens:
    array = np.array(ids, np.int64)
    return Tokens(array, np.where(np.arange(len(ids)) < prompt, IGNORED, array))


@pytest.mark.parametrize("length", [2, 3, 5, 9, 10, 11, 99])
def test_windows_of_a_text_teach_each_token_once_behind_the_one_before(length: int) -> None:
    pairs: list[tuple[int, int]] = []
    for ids, labels in windows([tokens(*range(10))], length):
        assert 2 <= len(ids) <= length
        assert (labels[1:] == ids[1:]).all()
        pairs += pairwise(map(int, ids))
    assert pairs == list(pairwise(range(10)))


def test_an_example_with_a_prompt_is_cut_and_left_out_without_an_answer() -> None:
    with pytest.warns(ob.OnnxBackpropWarning, match=r"length: 2 of 3 examples are longer than 4 tokens"):
        rows = windows([tokens(1, 2, 3, prompt=2), tokens(*range(6), prompt=3), tokens(*range(6), prompt=4)], 4)
    assert [row.labels.tolist() for row in rows] == [[IGNORED, IGNORED, 3], [IGNORED, IGNORED, IGNORED, 3]]


def test_batches_are_as_long_as_their_longest_row() -> None:
    examples = [tokens(*range(1, n)) for n in (4, 5, 12)]
    first, second = TextBatches(examples, 2, length=32, pad=7, shuffle=False)
    assert first["input_ids"].tolist() == [[1, 2, 3, 7, 7, 7, 7, 7], [1, 2, 3, 4, 7, 7, 7, 7]]
    assert first["labels"].tolist() == [[IGNORED, 2, 3] + [IGNORED] * 5, [IGNORED, 2, 3, 4] + [IGNORED] * 4]
    assert first["attention_mask"].tolist() == [[1, 1, 1] + [0] * 5, [1, 1, 1, 1] + [0] * 4]
    assert first["position_ids"].tolist() == [[0, 1, 2] + [0] * 5, [0, 1, 2, 3] + [0] * 4]
    assert {name: array.shape for name, array in second.items()} == dict.fromkeys(first, (1, 16))
    assert {array.dtype for array in second.values()} == {np.dtype(np.int64)}


def test_packed_rows_hold_every_example_once_and_teach_none_its_first_token() -> None:
    sizes = [5, 3, 9, 4, 2, 6, 10]
    examples = [tokens(*range(100 * n, 100 * n + size)) for n, size in enumerate(sizes)]
    batches = TextBatches(examples, 99, length=10, pack=True, shuffle=False)
    (batch,) = batches
    assert len(batch["input_ids"]) == 4  # 39 tokens in rows of 10
    unpadded = batch["input_ids"][batch["attention_mask"] == 1]
    assert sorted(unpadded) == sorted(np.concatenate([ids for ids, _ in examples]))
    at = batch["attention_mask"] == 1
    np.testing.assert_array_equal(batch["position_ids"][at], unpadded % 100)
    np.testing.assert_array_equal(batch["labels"][at], np.where(unpadded % 100 == 0, IGNORED, unpadded))
    assert batches.learned == sum(sizes) - len(sizes) == int((batch["labels"] != IGNORED).sum())


def test_names_choose_arrays_and_rows_are_shuffled_alike() -> None:
    examples = [tokens(*[n] * (n + 1)) for n in range(1, 9)]
    batches = TextBatches(examples, 3, length=16, names=["labels", "input_ids"], seed=3)
    for batch in batches:
        assert list(batch) == ["labels", "input_ids"]
        real = batch["labels"] != IGNORED
        np.testing.assert_array_equal(batch["labels"][real], batch["input_ids"][real])
        assert batch["input_ids"].shape[1] == -(-(max(batch["input_ids"].max(axis=1)) + 1) // 8) * 8


def test_nothing_to_learn_and_no_length_are_refused() -> None:
    with pytest.raises(ob.InvalidArgumentError, match=r"examples: expected at least one with something to learn"):
        TextBatches([tokens(1, 2, prompt=2)], 1, length=8)
    with pytest.raises(ob.InvalidArgumentError, match=r"length: expected 2 or more, got 1"):
        windows([tokens(1, 2)], 1)


MESSAGES = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": " U "},
    {"role": "assistant", "content": "A"},
    {"role": "user", "content": "V"},
    {"role": "assistant", "content": "B", "weight": 0},
]
WRITTEN = {
    "chatml": "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\n U <|im_end|>\n<|im_start|>assistant\n[A<|im_end|>\n]"
    "<|im_start|>user\nV<|im_end|>\n<|im_start|>assistant\nB<|im_end|>\n",
    "llama3": "<|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n"
    "U<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n[A<|eot_id|>]<|start_header_id|>user"
    "<|end_header_id|>\n\nV<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nB<|eot_id|>",
    "gemma": "<start_of_turn>user\nS\n\nU<end_of_turn>\n<start_of_turn>model\n[A<end_of_turn>\n]"
    "<start_of_turn>user\nV<end_of_turn>\n<start_of_turn>model\nB<end_of_turn>\n",
    "phi": "<|system|>\nS<|end|>\n<|user|>\n U <|end|>\n<|assistant|>\n[A<|end|>\n]<|user|>\nV<|end|>\n<|assistant|>\n"
    "B<|end|>\n",
    "mistral": "[INST] S\n\n U [/INST][ A</s>][INST] V[/INST] B</s>",
}


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_templates_write_turns_and_learn_answers_alone(name: str) -> None:
    assert "".join(f"[{part}]" if learned else part for part, learned in TEMPLATES[name](MESSAGES)) == WRITTEN[name]


def test_the_command_knows_the_templates() -> None:
    (argument,) = (a for a in COMMAND.all_arguments() if a.dest == "template")
    assert argument.settings["choices"] == tuple(TEMPLATES)


def test_the_room_offers_its_own_names_alone() -> None:
    assert dir(text) == sorted(text.__all__)
    assert ob.text is text
