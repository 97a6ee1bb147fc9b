"""Reads the JSON of a request into prompts and settings, every field checked.

A field that is not implemented is refused unless it has the value that changes nothing: a suite must not measure something other
than it asks for.
"""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from farsight.data.instructions.chat import ChatTemplate
from farsight.data.instructions.conversations import UnusableRow
from farsight.data.tokenizers.tokenizer import Tokenizer
from farsight.errors import nearest
from farsight.inference.sampling import Sampling
from farsight.inference.serve.errors import RequestError

MOST_TOP = 20
"""Likeliest tokens that a request may log in each place."""
DEFAULT_TOKENS = 16
"""`max_tokens` of a completion, as in OpenAI's API."""

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "suffix": ("",),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "top_k": (-1, 0),
    "min_p": (0,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}
"""Fields that are not implemented, and the values, beside null, that ask for nothing."""
_UNHEEDED = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
"""Fields that change no answer."""
_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a string", dict: "an object"}


@dataclass(frozen=True)
class Served:
    """A model that is served, and the limits of its requests."""

    name: str
    tokenizer: Tokenizer
    end_tokens: frozenset[int | None]
    template: ChatTemplate | None
    """None: the model has no chat template, and conversations are refused."""
    max_length: int
    """Most tokens of a prompt and its answer."""
    queue: int
    """Most answers that one request may ask for."""
    turn_end: int | None = None
    """Token that ends an answer in a conversation."""


@dataclass(frozen=True)
class Asked:
    """A checked request."""

    chat: bool
    prompts: tuple[tuple[int, ...], ...]
    texts: tuple[str, ...]
    """The prompts as text, for `echo`."""
    new_tokens: tuple[int, ...]
    """For each prompt."""
    answers: int
    """To each prompt."""
    sampling: Sampling
    stop: tuple[str, ...]
    end_tokens: frozenset[int | None]
    top: int | None
    echo: bool
    stream: bool
    usage: bool
    """End a stream with the numbers of tokens."""


@dataclass
class Fields:
    """The fields of a JSON object, taken one after the other."""

    values: Mapping[str, Any]
    taken: set[str] = field(default_factory=set)

    def take(self, name: str, kind: type, default: Any = None) -> Any:
        """A field's value; the default for null and where it is missing.

        Raises:
            RequestError: a value of another kind.
        """
        self.taken.add(name)
        value = self.values.get(name)
        if value is None:
            return default
        if kind is float and type(value) is int:
            return float(value)
        if type(value) is not kind:
            raise RequestError(f"{name} is {_shown(value)}; it must be {_KINDS[kind]}.", parameter=name)
        return value

    def count(self, name: str, default: int | None, least: int, most: int, limit: str = "") -> Any:
        """A whole number in a range, or the default.

        Args:
            limit: the server's option that sets the largest.
        """
        value = self.take(name, int, default)
        if value is not None and not least <= value <= most:
            said = f"{most:,}{limit and f' ({limit})'}"
            raise RequestError(f"{name} is {value}; it must be from {least:,} to {said}.", parameter=name)
        return value

    def finish(self) -> None:
        """Refuses fields that nobody took and that would change the answer."""
        for name, value in self.values.items():
            if name in self.taken or name in _UNHEEDED or value is None:
                continue
            if name not in _NEUTRAL:
                raise RequestError(
                    f"{name} is not a field that this server knows.{nearest(name, sorted(self.taken))}", parameter=name
                )
            if value not in _NEUTRAL[name]:
                raise RequestError(f"{name} = {_shown(value)} is not supported; leave {name} out.", parameter=name)


def read_completion(body: Any, served: Served) -> Asked:
    """The request in the body of /v1/completions.

    Raises:
        RequestError: a field that can't be used, or a prompt that doesn't fit.
    """
    fields = Fields(_object(body))
    texts, prompts = _prompts(fields, served)
    new_tokens = fields.count("max_tokens", DEFAULT_TOKENS, 0, served.max_length, "--max-length")
    top = fields.count("logprobs", None, 0, MOST_TOP)
    echo = fields.take("echo", bool, False)
    if not new_tokens and not echo:
        raise RequestError(
            "max_tokens is 0, which asks for nothing; ask for 1 or more, or set echo.", parameter="max_tokens"
        )
    return _asked(fields, served, False, prompts, texts, (new_tokens,) * len(prompts), top, echo)


def read_chat(body: Any, served: Served) -> Asked:
    """The request in the body of /v1/chat/completions. Raises RequestError as `read_completion` does."""
    fields = Fields(_object(body))
    prompt = tuple(_conversation(fields, served))
    asked = {
        name: fields.count(name, None, 1, served.max_length, "--max-length")
        for name in ("max_completion_tokens", "max_tokens")
    }
    given = {value for value in asked.values() if value is not None}
    if len(given) > 1:
        raise RequestError(
            f"{' and '.join(f'{name} is {value}' for name, value in asked.items())}; send one of them.",
            parameter="max_tokens",
        )
    longest = next(iter(given), None)
    if longest is None:  # what the context leaves
        longest = max(1, served.max_length - len(prompt))
    top = fields.count("top_logprobs", 0, 0, MOST_TOP)
    logs = fields.take("logprobs", bool, False)
    if top and not logs:
        raise RequestError("top_logprobs is set without logprobs: true.", parameter="top_logprobs")
    return _asked(fields, served, True, (prompt,), ("",), (longest,), top if logs else None, False)


def _asked(
    fields: Fields,
    served: Served,
    chat: bool,
    prompts: tuple[tuple[int, ...], ...],
    texts: tuple[str, ...],
    new_tokens: tuple[int, ...],
    top: int | None,
    echo: bool,
) -> Asked:
    """The fields that both kinds of requests share."""
    model = fields.take("model", str)
    if model not in (None, served.name):
        raise RequestError(
            f"There is no model {model!r} here; this server has {served.name!r}.", 404, "model_not_found", "model"
        )
    answers = fields.count("n", 1, 1, served.queue, "--queue")
    if answers * len(prompts) > served.queue:
        raise RequestError(
            f"{answers * len(prompts)} answers were asked for at once; this server queues {served.queue} (--queue).",
            parameter="n",
        )
    for prompt, new in zip(prompts, new_tokens, strict=True):
        if len(prompt) + new > served.max_length:
            raise RequestError(
                f"This server's maximum context length is {served.max_length:,} tokens (--max-length), and you asked for "
                f"{len(prompt) + new:,}: {len(prompt):,} in the prompt and {new:,} to be written. Shorten one of them.",
                code="context_length_exceeded",
                parameter="messages" if chat else "prompt",
            )
    stream = fields.take("stream", bool, False)
    options = Fields(fields.take("stream_options", dict, {}))
    usage = options.take("include_usage", bool, False)
    options.finish()
    if fields.values.get("best_of") == answers:
        fields.taken.add("best_of")
    stop, sampling = _stop(fields), _sampling(fields)
    fields.finish()
    ends = served.end_tokens | ({served.turn_end} if chat else set())
    return Asked(chat, prompts, texts, new_tokens, answers, sampling, stop, ends, top, echo, stream, usage)


def _sampling(fields: Fields) -> Sampling:
    temperature, top_p = fields.take("temperature", float, 1.0), fields.take("top_p", float, 1.0)
    seed = fields.count("seed", None, -(2**63), 2**63 - 1)
    try:
        # Without a seed, answers to the same request differ, as samples should.
        return Sampling(temperature, top_p, secrets.randbits(62) if seed is None else seed % 2**62)
    except ValueError as error:
        raise RequestError(f"{error}.", parameter=str(error).partition(" ")[0]) from None


def _stop(fields: Fields) -> tuple[str, ...]:
    fields.taken.add("stop")
    stop = fields.values.get("stop")
    strings = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if not isinstance(strings, list) or not all(isinstance(string, str) for string in strings):
        raise RequestError(f"stop is {_shown(stop)}; it must be a string or a list of strings.", parameter="stop")
    if "" in strings:
        raise RequestError(
            f"stop is {_shown(stop)}, and every text holds the empty string; leave it out.", parameter="stop"
        )
    return tuple(strings)


def _prompts(fields: Fields, served: Served) -> tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]:
    """The texts and tokens of the field `prompt`: a string, token ids, or a list of one of them."""
    fields.taken.add("prompt")
    given = fields.values.get("prompt")
    tokenizer = served.tokenizer
    if given is None:
        raise RequestError(
            "prompt is missing: send a string or token ids; conversations go to /v1/chat/completions.",
            parameter="prompt",
        )
    if isinstance(given, str) or _is_tokens(given):
        given = [given]
    if not isinstance(given, list) or not given or not all(isinstance(p, str) or _is_tokens(p) for p in given):
        raise RequestError(
            f"prompt is {_shown(given)}; it must be a string, a list of token ids, or a list of one of them.",
            parameter="prompt",
        )
    texts, prompts = [], []
    for prompt in given:
        if isinstance(prompt, str):
            bos = [tokenizer.bos_id] if tokenizer.begins_with_bos and tokenizer.bos_id is not None else []
            try:
                tokens = bos + tokenizer.encode(prompt)
            except ValueError as error:
                raise RequestError(f"prompt: {error}", parameter="prompt") from None
        else:
            tokens = prompt
            outside = [token for token in tokens if not 0 <= token < tokenizer.vocab_size]
            if outside:
                raise RequestError(
                    f"prompt has the token {outside[0]}; the tokenizer has the tokens 0 to {tokenizer.vocab_size - 1:,}.",
                    parameter="prompt",
                )
        if not tokens:
            raise RequestError("prompt has no tokens; write at least one character.", parameter="prompt")
        texts.append(prompt if isinstance(prompt, str) else tokenizer.decode(tokens))
        prompts.append(tuple(tokens))
    return tuple(texts), tuple(prompts)


def _conversation(fields: Fields, served: Served) -> list[int]:
    """The tokens of the field `messages`, under the chat template."""
    if served.template is None:
        raise RequestError(
            f"{served.name} has no chat template: ask /v1/completions, or start the server with --chat-template FILE.",
            parameter="messages",
        )
    fields.taken.add("messages")
    given = fields.values.get("messages")
    if given is None:
        raise RequestError(
            "messages is missing: send a list of messages; prompts go to /v1/completions.", parameter="messages"
        )
    if not isinstance(given, list) or not given:
        raise RequestError(
            f"messages is {_shown(given)}; it must be a list of one or more messages.", parameter="messages"
        )
    messages = []
    for number, message in enumerate(given):
        place = f"messages[{number}]"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RequestError(
                f'{place} is {_shown(message)}; it must have a "role" and a "content".', parameter="messages"
            )
        messages.append({"role": message["role"], "content": _content(message.get("content"), place)})
        others = [key for key in message if key not in ("role", "content", "name") and message[key] not in (None, [])]
        if others:
            raise RequestError(f"{place}.{others[0]} is not supported; send text alone.", parameter="messages")
    try:
        return served.template.prompt_tokens(messages)
    except UnusableRow as error:
        raise RequestError(f"messages can't be used: {error.detail}; change them.", parameter="messages") from None


def _content(content: Any, place: str) -> str:
    """A message's text: a string, or parts of type "text"."""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in content
    ):
        return "".join(part["text"] for part in content)
    raise RequestError(
        f"{place}.content is {_shown(content)}; it must be a string, or parts of type text.", parameter="messages"
    )


def _is_tokens(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)


def _object(body: Any) -> dict[str, Any]:
    if not isinstance(body, dict):
        raise RequestError(f"The request is {_shown(body)}; it must be a JSON object.")
    return body


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
