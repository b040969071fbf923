"""Conversations as texts, of which the answers are learned: by the model's own jinja2 template or by one of a few."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from typing import Any

from onnx_backprop.opset.core.errors import InvalidArgumentError, warn
from onnx_backprop.text.tokenizer import Span, Tokenizer, extra

Messages = Sequence[Mapping[str, Any]]  # of "role" and "content"; "weight": 0 for an answer that is not learned, else 1
Template = Callable[[Messages], list[Span]]
_SPECIAL = re.compile(r"<[^<>\s]+>")  # not [INST], which is text to the first models of its template


@dataclass(frozen=True)
class Turns:
    """Turns one after the other, each between two texts in which {role} stands for the role.

    before, after: of every turn. answer: what the role of an answer is called. around: what is before and after an
    answer instead, and is learned with it, as `after` is else. system: whether there are turns of the system, whose
    text else stands before that of the next turn. trims: whether spaces around a turn's text are taken away. begins:
    whether the tokenizer's beginning is before all. token: one that a tokenizer has if it is for this template.
    """

    before: str
    after: str
    token: str
    answer: str = "assistant"
    around: tuple[str, str] | None = None
    system: bool = True
    trims: bool = False
    begins: bool = False

    def __call__(self, messages: Messages) -> list[Span]:
        """The parts of the text."""
        result: list[Span] = []
        waiting = ""
        for message in messages:
            role, content = message["role"], message["content"].strip() if self.trims else message["content"]
            if role == "system" and not self.system:
                waiting = f"{content}\n\n"
                continue
            if role != "assistant":
                result.append((self.before.replace("{role}", role) + waiting + content + self.after, False))
                waiting = ""
                continue
            if self.around is None:
                result.append((self.before.replace("{role}", self.answer), False))
            before, after = self.around or ("", self.after)
            result.append((before + content + after, is_learned(message)))
        return [span for span in result if span[0]]

    def special(self) -> list[str]:
        """The special tokens that it writes."""
        written = (part.replace("{role}", role) for part in (self.before, self.after) for role in ("user", self.answer))
        return list(dict.fromkeys(_SPECIAL.findall("".join((*written, *(self.around or ()))))))

    def jinja(self) -> str:
        """The same as a chat template of jinja2, as transformers and onnxruntime-genai read it."""
        content = "m.content | trim" if self.trims else "m.content"
        role_before = json.dumps(self.before).replace("{role}", '" + m.role + "')
        prompt = "" if self.around else self.before.replace("{role}", self.answer)
        before, after = self.around or (prompt, self.after)
        parts = [
            "{%- set held = namespace(text='') -%}",
            "{{- bos_token -}}" if self.begins else "",
            "{%- for m in messages -%}",
            f"{{%- if m.role == 'assistant' -%}}{{{{- {json.dumps(before)} + ({content}) + {json.dumps(after)} -}}}}",
            "" if self.system else f"{{%- elif m.role == 'system' -%}}{{%- set held.text = ({content}) + '\\n\\n' -%}}",
            f"{{%- else -%}}{{{{- {role_before} + held.text + ({content}) + {json.dumps(self.after)} -}}}}",
            "{%- set held.text = '' -%}{%- endif -%}{%- endfor -%}",
            f"{{%- if add_generation_prompt -%}}{{{{- {json.dumps(prompt)} -}}}}{{%- endif -%}}",
        ]
        return "".join(parts)


TEMPLATES = {
    "chatml": Turns("<|im_start|>{role}\n", "<|im_end|>\n", "<|im_start|>"),
    "llama3": Turns(
        "<|start_header_id|>{role}<|end_header_id|>\n\n", "<|eot_id|>", "<|start_header_id|>", trims=True, begins=True
    ),
    "gemma": Turns(
        "<start_of_turn>{role}\n", "<end_of_turn>\n", "<start_of_turn>", "model", system=False, trims=True, begins=True
    ),
    "phi": Turns("<|{role}|>\n", "<|end|>\n", "<|assistant|>"),
    "mistral": Turns("[INST] ", "[/INST]", "[INST]", around=(" ", "</s>"), system=False, begins=True),
}


def template_for(tokenizer: Tokenizer, name: str | None = None) -> Template:
    """The template of a name in `TEMPLATES`, or of a tokenizer: that of its configuration, else one for its tokens.

    Warns: OnnxBackpropWarning for one that its tokens suggest. Errors: InvalidArgumentError for an unknown name, for
    one of `TEMPLATES` whose special tokens the tokenizer does not have, or where nothing says which; KernelError for a
    template of jinja2 without jinja2.
    """
    if name is not None and name not in TEMPLATES:
        raise InvalidArgumentError(f"expected one of {', '.join(TEMPLATES)}, got {name!r}", "template")
    if name is not None:
        return _begun(name, tokenizer)
    if tokenizer.chat_template is not None:
        return _rendered(tokenizer.chat_template, tokenizer.special)
    match = next((name for name, turns in TEMPLATES.items() if turns.token in tokenizer), None)
    if match is None:
        raise InvalidArgumentError(
            f"the tokenizer has no template for conversations. Name one: {', '.join(TEMPLATES)}", "template"
        )
    token = TEMPLATES[match].token
    warn(f"the tokenizer has none; {match!r} is taken, since there is a token {token!r}", argument="template")
    return _begun(match, tokenizer)


def _begun(name: str, tokenizer: Tokenizer) -> Template:
    """A template with the tokenizer's beginning before all, where it has that."""
    turns = TEMPLATES[name]
    if missing := [token for token in turns.special() if token not in tokenizer]:
        fitting = [other for other, turns in TEMPLATES.items() if all(token in tokenizer for token in turns.special())]
        raise InvalidArgumentError(
            f"{name!r} writes {', '.join(missing)}, which are no tokens of the tokenizer but texts of many. "
            f"Name one of {', '.join(fitting) or 'none: no template fits'}, or write prompts and completions",
            "template",
        )
    begin = tokenizer.special.get("bos_token", "") if turns.begins else ""
    return lambda messages: [(begin, False), *turns(messages)] if begin else turns(messages)


def is_learned(message: Mapping[str, Any]) -> bool:
    """Whether a message is an answer to learn."""
    return message["role"] == "assistant" and message.get("weight", 1) != 0


def _rendered(source: str, special: Mapping[str, str]) -> Template:
    """A template of jinja2 as transformers renders it; an answer is what it adds to the conversation before it."""
    template, error = _environment().from_string, extra("jinja2").TemplateError
    try:
        compiled = template(source)
    except error as e:
        raise InvalidArgumentError(
            f"the chat template of the tokenizer cannot be read: {e}. Name another, as template='chatml'"
        ) from e

    def render(messages: Messages, *, prompt: bool = False) -> str:
        return compiled.render(messages=list(messages), add_generation_prompt=prompt, tools=None, **special)

    def spans(messages: Messages) -> list[Span]:
        try:
            whole, at, result = render(messages), 0, []
            for n, message in enumerate(messages):
                if not is_learned(message):
                    continue
                before, behind = render(messages[:n], prompt=True), render(messages[: n + 1])
                if not whole.startswith(behind) or not behind.startswith(before):
                    continue  # a template that writes earlier answers in another way, as without their thoughts
                result += [(whole[at : len(before)], False), (whole[len(before) : len(behind)], True)]
                at = len(behind)
        except error as e:
            raise InvalidArgumentError(f"the chat template of the tokenizer refuses this conversation: {e}") from e
        if not result:
            raise InvalidArgumentError("the chat template of the tokenizer does not show where an answer begins")
        return [span for span in (*result, (whole[at:], False)) if span[0]]

    return spans


@cache
def _environment() -> Any:
    """Jinja2 with what transformers gives to templates, and nothing else of this process."""
    sandbox = extra("jinja2.sandbox")

    def raise_exception(text: str) -> None:
        raise extra("jinja2").TemplateError(text)

    result = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    result.filters["tojson"] = lambda value, **more: json.dumps(value, ensure_ascii=False, **more)
    result.globals |= {"raise_exception": raise_exception, "strftime_now": lambda f: datetime.now().strftime(f)}
    return result
