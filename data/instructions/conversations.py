"""Converts rows of instruction data to conversations: Alpaca, ShareGPT, OpenAI messages, and plain text.

All become messages in the form of chat templates, {"role", "content", …}, each with a mark whether to train on it. Further
fields of a message (names, tool calls, reasoning) are passed on to the template unchanged.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from farsight.configs.finetuning import Format

_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
}
"""ShareGPT's names of roles, and common variants."""
_MESSAGE_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_NOT_OF_THE_MESSAGE = ("train", "weight")


class UnusableRow(Exception):  # noqa: N818  not an error if such rows are skipped
    """A row that is not a usable conversation, with the arguments of `BadRows.bad_row`: reason, detail and remedy."""

    def __init__(self, reason: str, detail: str, remedy: str):
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail, self.remedy = reason, detail, remedy


@dataclass(frozen=True)
class Conversation:
    """A conversation, or plain text to train on, before a chat template renders it."""

    messages: tuple[dict[str, Any], ...] = ()
    """{"role", "content", …}, as chat templates take them."""
    train: tuple[bool | None, ...] = ()
    """Whether to train on each message; None leaves it to `data.train_on`."""
    tools: list[Any] | None = None
    """JSON schemas of functions that the model may call."""
    text: str | None = None
    """Plain text instead of messages; all of it is trained."""

    def identity(self) -> bytes:
        """Bytes that are equal for copies in any format; their hash decides on the held-out split.

        Raises `UnusableRow` for invalid Unicode.
        """
        said = [[message["role"], message.get("content", "")] for message in self.messages]
        text = self.text if self.text is not None else json.dumps(said, ensure_ascii=False)
        try:
            return text.encode()
        except UnicodeEncodeError:
            raise UnusableRow("not UTF-8", "the text holds a lone surrogate", "repair the row") from None


def to_conversation(
    row: dict[str, Any], form: Format, question: str = "instruction", answer: str = "output"
) -> Conversation:
    """Converts a row. Raises `UnusableRow` for one that does not have the format.

    `question` and `answer` name the columns of Alpaca's instruction and output.
    """
    row = {name: value for name, value in row.items() if value is not None}  # a table's empty cells
    form = _form_of(row, question, answer) if form == "auto" else form
    conversation = _alpaca(row, question, answer) if form == "alpaca" else _READERS[form](row)
    if conversation.text is None and not conversation.messages:
        raise UnusableRow("no messages", "the conversation is empty", "remove the row")
    return conversation


def _form_of(row: dict[str, Any], question: str, answer: str) -> Format:
    if "messages" in row:
        return "messages"
    if "conversations" in row:
        turns = row["conversations"]
        said_by = isinstance(turns, list) and turns and isinstance(turns[0], dict) and "role" in turns[0]
        return "messages" if said_by else "sharegpt"
    if question in row and answer in row:
        return "alpaca"
    if "text" in row:
        return "text"
    raise UnusableRow(
        "no known format",
        f"its columns are {', '.join(sorted(row)) or 'none'}",
        f"make them those of a format: {question} and {answer} (alpaca; the source's `question` and `answer` name "
        "others), conversations (sharegpt), messages, or text",
    )


def _alpaca(row: dict[str, Any], question: str, answer: str) -> Conversation:
    asked, more, answered = (_string(row, name) for name in (question, "input", answer))
    asked = f"{asked}\n\n{more}" if more else asked
    turns = [("system", _string(row, "system")), ("user", asked), ("assistant", answered)]
    messages = tuple({"role": role, "content": said} for role, said in turns if said or role != "system")
    _check_answer(messages[-1])
    return Conversation(messages, (None,) * len(messages))


def _sharegpt(row: dict[str, Any]) -> Conversation:
    messages: list[dict[str, Any]] = []
    train: list[bool | None] = []
    if system := _string(row, "system"):
        messages.append({"role": "system", "content": system})
        train.append(None)
    for turn in _turns(row, "conversations"):
        speaker = turn.get("from", turn.get("role"))
        if speaker not in _ROLES:
            known = ", ".join(_ROLES)
            raise UnusableRow("unknown role", f'"from" is {speaker!r}; known are {known}', "rename it")
        message = {"role": _ROLES[speaker], "content": _string(turn, "value")}
        _check_answer(message)
        messages.append(message)
        train.append(_override(turn))
    return Conversation(tuple(messages), tuple(train))


def _messages(row: dict[str, Any]) -> Conversation:
    messages: list[dict[str, Any]] = []
    train: list[bool | None] = []
    for turn in _turns(row, "messages" if "messages" in row else "conversations"):
        if turn.get("role") not in _MESSAGE_ROLES:
            known = ", ".join(_MESSAGE_ROLES)
            raise UnusableRow("unknown role", f'"role" is {turn.get("role")!r}; known are {known}', "rename it")
        message = {name: value for name, value in turn.items() if name not in _NOT_OF_THE_MESSAGE}
        if isinstance(message.get("content"), list):
            message["content"] = "".join(map(_text_of_part, message["content"]))
        elif "content" in message or "tool_calls" not in message:
            message["content"] = _string(message, "content")
        _check_answer(message)
        messages.append(message)
        train.append(_override(turn))
    tools = row.get("tools")
    return Conversation(tuple(messages), tuple(train), tools if isinstance(tools, list) and tools else None)


def _text(row: dict[str, Any]) -> Conversation:
    text = _string(row, "text")
    if not text:
        raise UnusableRow("no text", "'text' is empty", "remove the row")
    return Conversation(text=text)


_READERS: dict[Format, Callable[[dict[str, Any]], Conversation]] = {
    "sharegpt": _sharegpt,
    "messages": _messages,
    "text": _text,
}
_MAY_LACK = ("input", "system")


def _turns(row: dict[str, Any], column: str) -> list[dict[str, Any]]:
    """The turns of a conversation, without their empty cells."""
    if column not in row:
        raise _missing(column, row)
    turns = row[column]
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise UnusableRow("not a conversation", f"'{column}' is not a list of objects", "repair the row")
    return [{name: value for name, value in turn.items() if value is not None} for turn in turns]


def _string(row: dict[str, Any], column: str) -> str:
    if column not in row:
        if column in _MAY_LACK:
            return ""
        raise _missing(column, row)
    if not isinstance(row[column], str):
        found = type(row[column]).__name__
        raise UnusableRow("not a string", f"'{column}' is {found}", "repair the row, or set the source's `format`")
    return row[column]


def _text_of_part(part: Any) -> str:
    if isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
        return part["text"]
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise UnusableRow("not text", f"a part of a message's content is {kind!r}", "leave rows with other media out")


def _override(turn: dict[str, Any]) -> bool | None:
    """A turn's own "train" (true or false) or "weight" (0 or 1), as Axolotl and OpenAI name it."""
    for name in _NOT_OF_THE_MESSAGE:
        if name in turn:
            if turn[name] not in (0, 1):
                raise UnusableRow(
                    f'no such "{name}"', f'a turn\'s "{name}" is {turn[name]!r}', 'write "train": true or false'
                )
            return bool(turn[name])
    return None


def _check_answer(message: dict[str, Any]) -> None:
    if message["role"] == "assistant" and not message.get("content", "").strip() and not message.get("tool_calls"):
        raise UnusableRow("empty answer", "the assistant says nothing", "remove the row")


def _missing(column: str, row: dict[str, Any]) -> UnusableRow:
    there = ", ".join(sorted(row)) or "none"
    return UnusableRow("missing field", f"no '{column}'; there are: {there}", "set the source's `format`")
