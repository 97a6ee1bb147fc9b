"""Turns conversations into tokens with a chat template, and marks those to train on.

The template is rendered as in `transformers`, so a model is trained on the text that `apply_chat_template` later gives it.
To find the assistant's part of the text, the conversation is rendered again: up to the turn with the header of an answer,
and up to the turn's end. Templates with `{% generation %}` blocks mark that part themselves. Special tokens in the rendered
text are recognised; a message that contains one is refused, since it could forge the end of a turn.

With Llama 3's template, T marking trained tokens:

    <|begin_of_text|><|start_header_id|>user<|end_header_id|>⏎⏎Hello<|eot_id|><|start_header_id|>assistant…⏎⏎Hi!<|eot_id|>
                                                                                                          TTT TTTTTTTTTT
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from farsight.configs.finetuning import InstructionData, TrainOn
from farsight.data.instructions.conversations import Conversation, UnusableRow
from farsight.data.instructions.jinja_template import Cut, JinjaTemplate, Rendered, Span
from farsight.data.tokenizers.base import Encoded
from farsight.data.tokenizers.tokenizer import Tokenizer
from farsight.errors import DataError

LLAMA_3 = """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {%- if message['tool_calls'] %}
        {{- raise_exception("Llama 3's own template writes no tool calls: name one that does in data.chat_template") }}
    {%- endif %}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
"""Gives the same text as the template of Meta-Llama-3-8B-Instruct."""

_REMEDY = "repair the row, or set data.chat_template"
_MARKER = re.compile(r"<\|[^|<>\s]+\|>")
_CONTENT_END = "CONTENT-ENDS-HERE"
"""Marks the end of a message's content in a rendered text."""
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class Tokens:
    """A conversation of T tokens, as rows of training are filled with it."""

    ids: np.ndarray
    """int32 [T]."""
    trained: np.ndarray
    """bool [T]: whether the model is trained to predict the token."""


@dataclass(frozen=True)
class Marked:
    """The text of a conversation, and the spans of it to train on."""

    text: str
    trained: tuple[Span, ...]
    plain: bool = False
    """Plain text without a template: special tokens in it are text, and bos and eos are yet to be added."""


class ChatTemplate:
    """A chat template for one tokenizer: `mark` renders a conversation, `encode` tokenises it."""

    def __init__(self, source: str, name: str, tokenizer: Tokenizer):
        """`name`: the template's origin, for errors. Raises `DataError` if `source` is not a Jinja template."""
        self.source, self.name = source, name
        self._tokenizer = tokenizer
        self._template = JinjaTemplate(source, name)
        self._marks_answers = _GENERATION.search(source) is not None
        names = {
            "bos_token": tokenizer.special_token(tokenizer.bos_id),
            "eos_token": tokenizer.special_token(tokenizer.eos_id),
        }
        self._names = {name: token for name, token in names.items() if token is not None}
        # Markers of the template that the tokenizer lacks are plain text, but messages must not contain them either.
        self._markers = tuple(dict.fromkeys([*tokenizer.special_tokens, *_MARKER.findall(source)]))
        self._any_marker = re.compile("|".join(map(re.escape, sorted(self._markers, key=len, reverse=True))))

    @property
    def fingerprint(self) -> str:
        """A hash of the template's source."""
        return blake2b(self.source.encode(), digest_size=16).hexdigest()

    def save(self, directory: str | Path) -> None:
        """Writes the template beside a tokenizer's files, where `transformers` finds it."""
        (Path(directory) / "chat_template.jinja").write_text(self.source, encoding="utf-8")

    def prompt(self, messages: Sequence[dict[str, Any]]) -> str:
        """The text of messages for a model to answer, ending with the header of its answer.

        Raises `UnusableRow` if the template refuses them.
        """
        return self._render(Conversation(tuple(messages)), [(len(messages), True)])[0].text

    def unfinished(self, messages: Sequence[dict[str, Any]]) -> str:
        """The text of messages up to the end of the last one's content, for a model to continue that message.

        Raises `UnusableRow` if the template refuses the messages, or leaves out the last one.
        """
        return self._around_last(messages)[0]

    def turn_end(self) -> int | None:
        """The special token that ends an assistant's turn; None if the template writes none (training then adds eos).

        Raises `UnusableRow` if the template refuses a question and its answer.
        """
        messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
        (after,) = self._tokenizer.encode_rendered([self._around_last(messages)[1]])
        special = set(self._tokenizer.special_tokens.values())
        return next((token for token in after.ids.tolist() if token in special), None)

    def _around_last(self, messages: Sequence[dict[str, Any]]) -> tuple[str, str]:
        """The rendered text before and after the end of the last message's content, which a mark in the content shows, as
        in `transformers`: what a template writes around an answer may differ from the header that it asks for one with."""
        *before, last = messages
        marked = {**last, "content": f"{last['content']}{_CONTENT_END} "}
        text = self._render(Conversation((*before, marked)), [(len(messages), False)])[0].text
        if _CONTENT_END not in text:
            raise UnusableRow(
                "turns not found",
                f"the chat template {self.name} leaves out the content of message {len(messages)}",
                _REMEDY,
            )
        begin, _, end = text.rpartition(_CONTENT_END)
        # A template that strips contents would have stripped this one's end too.
        return (begin, end[1:]) if end.startswith(" ") else (begin.rstrip(), end)

    def mark(self, conversation: Conversation, train_on: TrainOn) -> Marked:
        """Renders a conversation and marks the spans to train on: assistant turns from the end of their header through
        their end-of-turn token, or everything with `train_on = "all"`; a turn's own "train" mark takes precedence.

        Raises `UnusableRow` for a message that contains a special token, for one that the template refuses, and for turns
        that can't be found in the text.
        """
        if conversation.text is not None:
            return Marked(conversation.text, ((0, len(conversation.text)),), plain=True)
        self._refuse_markers(conversation)
        everything, messages = train_on == "all", conversation.messages
        wanted = _wanted(conversation)
        untrained = [i for i, train in enumerate(conversation.train) if train is False]
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        # Turns to locate in the text, by rendering the messages before them and through their end.
        sought = untrained if everything else [i for i in wanted if i not in answers or not self._marks_answers]
        cuts = [(i, i in answers and not everything) for i in sought] + [(i + 1, False) for i in sought]
        whole, *prefixes = self._render(conversation, [(len(messages), False), *cuts])
        text, spans = whole.text, list(whole.blocks)
        turns = _Turns(self, conversation, text, dict(zip(cuts, prefixes, strict=True)))
        if everything:
            return Marked(text, _without(len(text), [turns.whole(i) for i in untrained]))
        if not self._marks_answers:
            return Marked(text, tuple(turns.content(i) for i in wanted))
        if not all(i in wanted for i in answers):
            if len(spans) != len(answers):
                raise UnusableRow(
                    "turns not found",
                    f"the chat template {self.name} marks {len(spans)} answers, the conversation has {len(answers)}",
                    'leave out the "train" of its turns',
                )
            spans = [span for i, span in zip(answers, spans, strict=True) if i in wanted]
        return Marked(text, tuple(sorted([*spans, *(turns.content(i) for i in sought)])))

    def prompt_tokens(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """The token ids of `prompt`'s text; generation starts from them.

        Raises `UnusableRow` as `prompt` does, and for a message that contains a special token.
        """
        self._refuse_markers(Conversation(tuple(messages)))
        (encoded,) = self._tokenizer.encode_rendered([self.prompt(messages)])
        return encoded.ids.tolist()

    def encode(self, marked: Sequence[Marked]) -> list[Tokens]:
        """Tokenises conversations, in one batch.

        If no special token ends the last turn, eos is added, and trained if the turn is: the model must learn where an answer
        ends.
        """
        rendered = iter(self._tokenizer.encode_rendered([one.text for one in marked if not one.plain]))
        return [self._encode_plain(one.text) if one.plain else self._trained(one, next(rendered)) for one in marked]

    def _encode_plain(self, text: str) -> Tokens:
        ids = [self._tokenizer.bos_id, *self._tokenizer.encode(text), self._tokenizer.eos_id]
        found = np.array([i for i in ids if i is not None], dtype=np.int32)
        return Tokens(found, np.ones(len(found), dtype=bool))

    def _trained(self, marked: Marked, encoded: Encoded) -> Tokens:
        ids, trained = encoded.ids, np.zeros(len(encoded.ids), dtype=bool)
        for begin, end in marked.trained:
            trained |= (encoded.ends > begin) & (encoded.begins < end)
        special = np.flatnonzero(np.isin(ids, list(self._tokenizer.special_tokens.values())))
        closed = len(special) > 0 and not marked.text[encoded.ends[special[-1]] :].strip()
        if not closed and self._tokenizer.eos_id is not None:
            to_the_end = any(end >= len(marked.text.rstrip()) for _, end in marked.trained)
            ids = np.append(ids, np.int32(self._tokenizer.eos_id))
            trained = np.append(trained, to_the_end)
        return Tokens(ids, trained)

    def _render(self, conversation: Conversation, cuts: Sequence[Cut]) -> list[Rendered]:
        """The conversation up to each of several cuts. Raises `UnusableRow` if the template refuses the first."""
        messages, tools = conversation.messages, conversation.tools
        first, *others = self._template.render(cuts, messages=messages, tools=tools, documents=None, **self._names)
        if first.error is not None:
            raise UnusableRow("refused by the chat template", f"{self.name}: {first.error}", _REMEDY)
        return [first, *others]

    def _refuse_markers(self, conversation: Conversation) -> None:
        for string in _strings([conversation.messages, conversation.tools]):
            if self._markers and (found := self._any_marker.search(string)):
                raise UnusableRow(
                    "special token in the text",
                    f"a message holds the special token {found[0]}, which could end its turn",
                    "take it out of the text",
                )


class _Turns:
    """Locates the turns in a rendered conversation."""

    def __init__(self, template: ChatTemplate, conversation: Conversation, text: str, prefixes: dict[Cut, Rendered]):
        self._template, self._conversation, self._text, self._prefixes = template, conversation, text, prefixes

    def whole(self, turn: int) -> Span:
        """The span of a turn with its header."""
        return self._length(turn), self._length(turn + 1)

    def content(self, turn: int) -> Span:
        """The span of a turn's content and end-of-turn token, without its header and trailing whitespace."""
        message = self._conversation.messages[turn]
        end = self._length(turn + 1)
        if message["role"] == "assistant":
            begin = self._length(turn, header=True)
        else:
            # Searched from the end of the turn: a short text may also occur in the header.
            content, said = message.get("content", "").strip(), self._text[self._length(turn) : end].rstrip()
            marker = next((m for m in self._template._markers if said.endswith(m)), "")
            said = said.removesuffix(marker).rstrip()
            begin = self._length(turn) + len(said) - len(content)
            if not said.endswith(content):
                raise UnusableRow(
                    "turns not found",
                    f"the chat template {self._template.name} changes the text of message {turn + 1}",
                    'leave out its "train"',
                )
        said = self._text[begin:end].rstrip()
        return begin, begin + len(said) if said.endswith(self._template._markers) else end

    def _length(self, upto: int, header: bool = False) -> int:
        """Characters of the first `upto` messages; with `header`, also of the answer header after them."""
        if not header and upto in (0, len(self._conversation.messages)):
            return len(self._text) if upto else 0
        prefix = self._prefixes[upto, header]
        if prefix.error is not None:
            raise UnusableRow(
                "turns not found",
                f"the first {upto} messages can't be rendered alone ({self._template.name}: {prefix.error})",
                _REMEDY,
            )
        if not self._text.startswith(prefix.text):
            raise UnusableRow(
                "turns not found",
                f"the chat template {self._template.name} writes the first {upto} messages in another way when more follow",
                "mark the answers with {% generation %} in a copy of the template, and set data.chat_template to it",
            )
        return len(prefix.text)


def chat_template(config: InstructionData, tokenizer: Tokenizer) -> ChatTemplate:
    """The chat template of a config: `data.chat_template`, else the tokenizer's own, else Llama 3's.

    Raises `DataError` for a file that can't be read or is not a template.
    """
    if config.chat_template:
        path = Path(config.chat_template).expanduser()
        try:
            return ChatTemplate(path.read_text(encoding="utf-8"), str(path), tokenizer)
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"data.chat_template = {config.chat_template}: it can't be read: {error}.") from error
    if tokenizer.chat_template is not None:
        return ChatTemplate(tokenizer.chat_template, "the tokenizer's chat template", tokenizer)
    return ChatTemplate(LLAMA_3, "Llama 3's chat template", tokenizer)


def _wanted(conversation: Conversation) -> list[int]:
    """The turns to train on: the assistant's, unless their own mark says otherwise."""
    return [
        i
        for i, (message, train) in enumerate(zip(conversation.messages, conversation.train, strict=True))
        if (message["role"] == "assistant" if train is None else train)
    ]


def _without(length: int, spans: Sequence[Span]) -> tuple[Span, ...]:
    """The spans of 0 … length-1 that remain without the given ones, which are in order."""
    begins = [0, *(end for _, end in spans)]
    ends = [*(begin for begin, _ in spans), length]
    return tuple((begin, end) for begin, end in zip(begins, ends, strict=True) if begin < end)


def _strings(value: Any) -> Iterator[str]:
    """All strings in a JSON value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from _strings(list(value.keys()))
        yield from _strings(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)
