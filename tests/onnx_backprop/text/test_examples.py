"""Files of texts as tokens, by a tokenizer.json of some kB: what is learned, where tokens end, what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import onnx_backprop as ob
from onnx_backprop.text import IGNORED, TEMPLATES, Tokenizer, read_examples
from onnx_backprop.text.templates import template_for

tokenizers = pytest.importorskip("tokenizers")
FOLDER = Path(__file__).parents[2] / "data" / "text"


@pytest.fixture
def tokenizer() -> Tokenizer:
    return Tokenizer(FOLDER, begins=True)


def read(tmp_path: Path, tokenizer: Tokenizer, *examples: Any, **options: Any) -> list[tuple[str, str]]:
    """Each example as its whole text, special tokens too, and the text that is learned."""
    file = tmp_path / "data.jsonl"
    file.write_text("\n\n".join(e if isinstance(e, str) else json.dumps(e) for e in examples) + "\n", "utf-8")
    parsed = read_examples(file, tokenizer, **options)
    decode = tokenizers.Tokenizer.from_file(str(FOLDER / "tokenizer.json")).decode
    for ids, labels in parsed:
        assert ((labels == ids) | (labels == IGNORED)).all()
    return [
        (decode(list(ids), skip_special_tokens=False), decode(list(ids[labels != IGNORED]), skip_special_tokens=False))
        for ids, labels in parsed
    ]


def test_texts_and_completions_end(tmp_path: Path, tokenizer: Tokenizer) -> None:
    examples = [
        {"text": "A text: é, 日本."},
        {"prompt": "2 + 2 =", "completion": " 4"},
        {"prompt": "", "completion": "x"},
    ]
    assert read(tmp_path, tokenizer, *examples) == [
        ("<s>A text: é, 日本.</s>", "A text: é, 日本.</s>"),
        ("<s>2 + 2 = 4</s>", " 4</s>"),
        ("<s>x</s>", "x</s>"),
    ]


def test_an_end_that_is_there_is_not_added(tmp_path: Path, tokenizer: Tokenizer) -> None:
    assert read(tmp_path, tokenizer, {"text": "<s>x</s>"}) == [("<s>x</s>", "<s>x</s>")]
    assert read(tmp_path, tokenizer, {"prompt": "</s>", "completion": "x"}) == [("<s></s>x</s>", "x</s>")]


def test_texts_begin_as_genai_reads_them(tmp_path: Path, tokenizer: Tokenizer) -> None:
    example = {"text": "x"}
    assert read(tmp_path, Tokenizer(FOLDER), example) == [("x</s>", "x</s>")]
    shutil.copy(FOLDER / "tokenizer.json", tmp_path)
    with pytest.warns(ob.OnnxBackpropWarning, match=r"tokenizer: nothing beside .* says which token ends a text"):
        alone = Tokenizer(tmp_path)
    assert alone.encode([("x", True)]).ids.tolist() == [1, *tokenizer.encode([("x", False)]).ids[1:]]
    assert Tokenizer(tmp_path, config=FOLDER / "genai_config.json").ends == tokenizer.ends == (2, 4)
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "x"}]
    ((text, learned),) = read(tmp_path, tokenizer, {"messages": chat}, template="mistral")
    assert (text, learned) == ("<s>[INST] Hi[/INST] x</s>", " x</s>")


def test_tokens_do_not_reach_over_the_end_of_a_prompt(tmp_path: Path, tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode([("json", True)]).ids) == 3, "a beginning, one token, an end"
    ids, labels = tokenizer.encode([("j", False), ("son", True)])
    prompt = tokenizer.encode([("j", False)]).ids
    assert ids[: len(prompt)].tolist() == prompt.tolist(), "the model reads a prompt without its answer"
    assert (labels[: len(prompt)] == IGNORED).all()
    assert read(tmp_path, tokenizer, {"prompt": "j", "completion": "son"}) == [("<s>json</s>", "son</s>")]


CHAT = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": [{"type": "text", "text": "Bye"}]},
    {"role": "assistant", "content": "See you."},
]
TURNS = [
    f"<|im_start|>{m['role']}\n{c}<|im_end|>\n" for m, c in zip(CHAT, ("Hi", "Hello.", "Bye", "See you."), strict=True)
]


def test_the_template_of_the_tokenizer_and_a_named_one_agree(tmp_path: Path, tokenizer: Tokenizer) -> None:
    expected = [("".join(TURNS), "Hello.<|im_end|>\nSee you.<|im_end|>\n")]
    assert read(tmp_path, tokenizer, {"messages": CHAT}, template="chatml") == expected
    pytest.importorskip("jinja2")
    assert read(tmp_path, tokenizer, {"messages": CHAT}) == expected


def test_a_template_is_guessed_with_a_warning(tmp_path: Path) -> None:
    shutil.copy(FOLDER / "tokenizer.json", tmp_path)
    bare = Tokenizer(tmp_path, config=FOLDER / "genai_config.json")
    with pytest.warns(ob.OnnxBackpropWarning, match=r"template: the tokenizer has none; 'chatml' is taken"):
        ((text, _),) = read(tmp_path, bare, {"messages": CHAT})
    assert text == "".join(TURNS)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_of_jinja2_writes_the_same(name: str) -> None:
    pytest.importorskip("jinja2")
    turns, tokenizer = TEMPLATES[name], Tokenizer(FOLDER)
    tokenizer.chat_template = turns.jinja()
    messages = [
        {"role": "system", "content": " Be\n'brief'. "},
        {"role": "user", "content": " Hi "},
        {"role": "assistant", "content": " Hello. ", "weight": 0},
        {"role": "tool", "content": '{"a": "\\n"}'},
        {"role": "assistant", "content": "See you.\n"},
    ]
    expected = turns(messages)
    if turns.begins:
        expected.insert(0, ("<s>", False))
    rendered = template_for(tokenizer)(messages)
    assert "".join(part for part, _ in rendered) == "".join(part for part, _ in expected)
    assert [part for part in rendered if part[1]] == [part for part in expected if part[1]]


def test_a_template_without_its_tokens_is_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    expected = (
        r"line 1: template: 'gemma' writes <start_of_turn>, <end_of_turn>, which are no tokens of the tokenizer .* "
        r"Name one of chatml, mistral, or write prompts"
    )
    with pytest.raises(ob.InvalidArgumentError, match=expected):
        read(tmp_path, tokenizer, {"messages": CHAT}, template="gemma")


def test_a_template_that_drops_earlier_answers_learns_the_last(tmp_path: Path, tokenizer: Tokenizer) -> None:
    pytest.importorskip("jinja2")
    tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}({{ m.content }}){% elif loop.last %}"
        "{{ m.content + eos_token }}{% endif %}{% endfor %}"
    )
    assert read(tmp_path, tokenizer, {"messages": CHAT}) == [("<s>(Hi)(Bye)See you.</s>", "See you.</s>")]
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ob.InvalidArgumentError, match=r"line 1: the chat template .* refuses .*: roles must alternate"):
        read(tmp_path, tokenizer, {"messages": CHAT})
    tokenizer.chat_template = "{{ ''.__class__.__mro__[1].__subclasses__() }}"  # a stranger's file runs nothing
    with pytest.raises(ob.InvalidArgumentError, match="unsafe"):
        read(tmp_path, tokenizer, {"messages": CHAT})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{'text': 'x'}", r'line 3: expected \{"text": …\}, .*, got no JSON'),
        ('["x"]', r"line 3: expected .*, got list"),
        ("{}", r"line 3: expected .*, got an object of nothing"),
        ('{"input": "x", "output": "y"}', r"line 3: expected .*, got an object of 'input', 'output'"),
        ('{"text": 3}', r"line 3: 'text': expected a text, got 'int'"),
        ('{"text": ""}', r"line 3: 'text': expected a text, got ''"),
        ('{"prompt": "x", "completion": ""}', r"line 3: 'completion': expected a text"),
        ('{"messages": {}}', r"line 3: 'messages': expected a list of objects"),
        (
            '{"messages": [{"role": "human", "content": "x"}]}',
            r"line 3: message 1: expected a 'role' of .* got 'human'",
        ),
        ('{"messages": [{"role": "user"}]}', r"line 3: message 1: expected a text as 'content', got NoneType"),
        ('{"messages": [{"role": "user", "content": "x"}]}', r"line 3: 'messages': expected at least one of role 'ass"),
        (
            '{"messages": [{"role": "assistant", "content": "x", "weight": 0.5}]}',
            r"line 3: message 1: expected a 'weight' of 0 or 1, got 0\.5",
        ),
        (
            '{"id": 1, "text": "x", "prompt": "y", "completion": "z"}',
            r"line 3: expected .*, got 'text', 'prompt', 'completion' in one line\. Keep the keys of one form",
        ),
        ('{"messages": [], "text": "x"}', r"line 3: expected .*, got 'messages', 'text' in one line"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, tokenizer: Tokenizer, line: str, message: str) -> None:
    with pytest.raises(ob.InvalidArgumentError, match=message):
        read(tmp_path, tokenizer, {"text": "x"}, line)


def test_files_that_are_no_texts_are_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    file = tmp_path / "data.txt"
    file.write_bytes(b"one\ntwo \xff")
    with pytest.raises(ob.InvalidArgumentError, match=r"data.txt, line 2: not UTF-8, at byte 8"):
        read_examples(file, tokenizer)
    file.write_text(" \n")
    with pytest.raises(ob.InvalidArgumentError, match="holds no text"):
        read_examples(file, tokenizer)
    with pytest.raises(ob.InvalidArgumentError, match="No such file"):
        read_examples(tmp_path / "none.txt", tokenizer)
    with pytest.raises(ob.InvalidArgumentError, match=r"tokenizer: there is no file .*tokenizer\.json"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ob.InvalidArgumentError, match=r"is not a tokenizer\.json"):
        Tokenizer(tmp_path)
    file.write_text("\ufeffa\r\nb", "utf-8")
    ((ids, _),) = read_examples(file, tokenizer)
    assert tokenizer.decode(ids) == "a\nb"


def test_a_template_without_conversations_says_so(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.warns(ob.OnnxBackpropWarning, match="template: has no effect: no line holds 'messages'"):
        read(tmp_path, tokenizer, {"text": "plain"}, template="chatml")
