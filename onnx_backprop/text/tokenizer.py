"""`Tokenizer`: texts to numbers, by the tokenizer.json that lies beside a model."""

import json
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from onnx_backprop.opset.core.errors import InvalidArgumentError, KernelError, warn

CONFIG = "genai_config.json"  # of onnxruntime-genai, beside a model
IGNORED = -100  # the label of a token that no loss counts
Span = tuple[str, bool]  # a part of a text, and whether the model is to learn it


class Tokens(NamedTuple):
    """One example: ids (T,) int64, and labels (T,), the ids that are learned and `IGNORED` in the other places."""

    ids: np.ndarray
    labels: np.ndarray


class Tokenizer:
    """A tokenizer.json, read by `tokenizers`, and what the configurations beside it say of ends and templates.

    begins: whether a text starts with the special tokens that the tokenizer adds around one. ends: the tokens that end
    a text or an answer, where onnxruntime-genai stops. pad: fills up rows. chat_template: the text of the jinja2
    template, or None. special: texts of special tokens, by their purpose.
    """

    def __init__(self, path: str | Path, *, config: Path | None = None, begins: bool | None = None) -> None:
        """path: a tokenizer.json, or a folder that has one. config: the genai_config.json, default: beside it.

        begins: default: unless there is one, by which onnxruntime-genai reads texts.
        `og.Tokenizer(…).encode` leaves the special tokens out unless `update_options(add_special_tokens="true")` was
        called, and the model is to meet in training what it meets later.

        Warns: OnnxBackpropWarning where nothing says which token ends a text. Errors: InvalidArgumentError for a file
        that is missing or is no tokenizer; KernelError without `tokenizers`.
        """
        path = Path(path)
        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.is_file():
            raise InvalidArgumentError(f"there is no file {file}. Name the tokenizer.json of the model", "tokenizer")
        library = extra("tokenizers")
        try:
            self._encoder = library.Tokenizer.from_file(str(file))
        except Exception as e:  # of its own Rust code
            raise InvalidArgumentError(f"{file} is not a tokenizer.json: {e}", "tokenizer") from e
        self._encoder.no_truncation()
        self._encoder.no_padding()
        model = read_json(config or file.with_name(CONFIG)).get("model", {})
        about = read_json(file.with_name("tokenizer_config.json"))
        self.begins = not model if begins is None else begins
        named = {key: about.get(key) for key in ("bos_token", "eos_token", "pad_token", "unk_token")}
        self.special = {k: v["content"] if isinstance(v, dict) else v for k, v in named.items() if v}
        ends = model.get("eos_token_id", self._encoder.token_to_id(self.special.get("eos_token", "")))
        self.ends: tuple[int, ...] = tuple(ends) if isinstance(ends, list) else () if ends is None else (ends,)
        pad = model.get("pad_token_id", self._encoder.token_to_id(self.special.get("pad_token", "")))
        self.pad: int = pad if isinstance(pad, int) and pad >= 0 else 0
        self.chat_template = _chat_template(file, about)
        if not self.ends:
            warn(f"nothing beside {file} says which token ends a text; none is learned", argument="tokenizer")

    def __len__(self) -> int:
        """How many tokens there are, added ones included."""
        return int(self._encoder.get_vocab_size())

    def __contains__(self, token: object) -> bool:
        """Whether a text is one token."""
        return isinstance(token, str) and self._encoder.token_to_id(token) is not None

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of tokens, special ones left out."""
        return str(self._encoder.decode([int(n) for n in ids]))

    def encode(self, spans: Sequence[Span], *, begins: bool | None = None) -> Tokens:
        """The tokens of a text that is given in parts, with an end. begins: default: as the tokenizer has it.

        The end is learned, and is added where the last part is learned and has none in it. Parts are tokenised
        together; one by one where a token would lie in two parts, as the model reads a prompt without its answer.
        """
        text = "".join(part for part, _ in spans)
        begins = self.begins if begins is None else begins
        begins = begins and not text.startswith(self.special.get("bos_token") or "\0")
        whole = self._encoder.encode(text, add_special_tokens=begins)
        starts = np.cumsum([0, *(len(part) for part, _ in spans)])
        inner = set(map(int, starts[1:-1]))
        if any(start < at < end for start, end in whole.offsets for at in inner if end - start > 1):
            pieces = [self._encoder.encode(p, add_special_tokens=begins and not n) for n, (p, _) in enumerate(spans)]
            ids = [n for piece in pieces for n in piece.ids]
            learned = [part[1] for part, piece in zip(spans, pieces, strict=True) for _ in piece.ids]
        else:
            ids, learned = list(whole.ids), []
            for start, end in whole.offsets:  # a token without text, as a beginning, is learned if the one before is
                part = int(np.searchsorted(starts, start, side="right")) - 1
                learned.append(spans[part][1] if end > start else bool(learned) and learned[-1])
        answer = ids[-learned[::-1].index(False) :] if False in learned and learned[-1] else ids
        if self.ends and spans[-1][1] and self.ends_of(answer) is None:
            ids.append(self.ends[0])
            learned.append(True)
        tokens = np.array(ids, np.int64)
        return Tokens(tokens, np.where(np.array(learned, bool), tokens, IGNORED))

    def ends_of(self, ids: Sequence[int]) -> int | None:
        """The place of the last token that ends a text, None where there is none."""
        places = [n for n, token in enumerate(ids) if token in self.ends]
        return places[-1] if places else None


def extra(name: str) -> Any:
    """A module of the extra `text`; KernelError where it is not installed."""
    try:
        return import_module(name)
    except ImportError as e:
        raise KernelError(f'{name} is not installed. Install it with `pip install "onnx-backprop[text]"`') from e


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, an empty one where there is no file; InvalidArgumentError for anything else."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text("utf-8"))
    except (ValueError, OSError) as e:
        raise InvalidArgumentError(f"{path} cannot be read as JSON: {e}") from e
    if not isinstance(content, dict):
        raise InvalidArgumentError(f"{path}: expected an object, got {type(content).__name__}")
    return content


def _chat_template(file: Path, config: dict[str, Any]) -> str | None:
    """The template of conversations beside a tokenizer; of several the one that is called "default", else the first."""
    beside = file.with_name("chat_template.jinja")
    if beside.is_file():
        return beside.read_text("utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {one.get("name"): one.get("template") for one in template if isinstance(one, dict)}
        template = named.get("default") or next(iter(named.values()), None)
    return template if isinstance(template, str) else None
