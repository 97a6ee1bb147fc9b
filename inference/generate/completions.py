"""Continues prompts token by token, streaming each row's text as it becomes certain."""

import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from tqdm import tqdm

from farsight.configs.finetuning import InstructionData
from farsight.data.instructions.chat import chat_template
from farsight.data.instructions.conversations import UnusableRow
from farsight.data.tokenizers.tokenizer import Tokenizer
from farsight.errors import ConfigError
from farsight.inference.decoder import Decoder, Rows
from farsight.inference.loading import LoadedModel
from farsight.inference.sampling import GREEDY, Sampling
from farsight.inference.step import Step, written
from farsight.inference.text_stream import TextStream


@dataclass(frozen=True)
class Completion:
    """A model's continuation of a prompt."""

    tokens: tuple[int, ...]
    """As drawn, the end token included."""
    text: str
    """Up to the stop string, which is excluded."""
    ended: Literal["end token", "stop string", "length"]


def generate(
    decoder: Decoder,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    sampling: Sampling = GREEDY,
    stop: Sequence[str] = (),
    rows_at_once: int = 8,
    on_text: Callable[[int, str], None] | None = None,
    bar: tqdm | None = None,
    end_tokens: Collection[int | None] | None = None,
    continued: bool = True,
) -> list[Completion]:
    """Continues each prompt until an end token, a stop string, or `new_tokens` tokens.

    Args:
        prompts: token ids, one or more each.
        rows_at_once: prompts read together, sorted by length.
        on_text: called with a prompt's number and each piece of its text, as soon as later tokens cannot change it.
        bar: advanced by the prompt tokens read; closed before the first call of `on_text`.
        end_tokens: used in place of the tokenizer's.
        continued: texts continue their prompts; False decodes them alone, where some tokenizers drop a space at the start.

    Raises:
        ConfigError: an empty prompt, one that is too long for the model's learned positions, or a model whose logits are not finite.
    """
    for n, prompt in enumerate(prompts):
        if not len(prompt):
            raise ConfigError(f"prompt {n} has no tokens; write at least one character.")
    decoder.check_length(max(map(len, prompts), default=0) + new_tokens)
    streams = [TextStream(tokenizer, prompt if continued else (), stop, end_tokens) for prompt in prompts]
    order = sorted(range(len(prompts)), key=lambda number: len(prompts[number]))
    batches = [
        numbers[i : i + rows_at_once]
        for numbers in decoder.group_by_positions(order, [len(prompts[n]) + new_tokens for n in order])
        for i in range(0, len(numbers), rows_at_once)
    ]
    for numbers in batches:
        rows, started = decoder.start([len(prompts[n]) for n in numbers], new_tokens), time.perf_counter()
        shown = None if bar is None else partial(_advance, bar, rows)
        logits_BV = read_prompts(rows, [prompts[n] for n in numbers], shown)
        if on_text is not None and bar is not None:
            bar.close()  # from here on the terminal's line belongs to the text
        generators, usage = sampling.generators(numbers), decoder.usage
        # A model's vocabulary may be rounded up; the extra entries have no text.
        step = Step(rows, logits_BV, tokenizer.vocab_size)
        for count, tokens in enumerate(written(step, new_tokens, sampling, generators), start=1):
            if count == 1:  # the first token waited until the prompt was read
                usage.seconds_reading += time.perf_counter() - started
                started = time.perf_counter()
            for n, token in zip(numbers, tokens, strict=True):
                piece = streams[n].push(token)
                if piece and on_text is not None:
                    on_text(n, piece)
            if count % 16 == 1 and bar is not None:
                bar.set_postfix_str(f"{count:,} tokens written")
            if all(streams[n].ended for n in numbers):
                break
        usage.seconds_writing += time.perf_counter() - started
        usage.cache_bytes = max(usage.cache_bytes, rows.nbytes)
        usage.dense_cache_bytes = max(usage.dense_cache_bytes, rows.dense_nbytes)
    decoder.usage.tokens_read += sum(map(len, prompts))
    # The first token comes from reading the prompt.
    decoder.usage.tokens_written += sum(max(len(stream.tokens) - 1, 0) for stream in streams)
    completions = []
    for n, stream in enumerate(streams):
        rest = stream.finish()
        if rest and on_text is not None:
            on_text(n, rest)
        completions.append(Completion(tuple(stream.tokens), stream.text, stream.ended or "length"))
    return completions


def _advance(bar: tqdm, rows: Rows, h_BLD: Tensor) -> None:
    """Counts the tokens of a chunk; left padding was read too, but does not count."""
    bar.update(sum(min(h_BLD.shape[1], max(0, rows.tokens - start)) for start in rows.batch.starts))


def read_prompts(
    rows: Rows, prompts: Sequence[Sequence[int] | Tensor], on_read: Callable[[Tensor], object] | None = None
) -> Tensor:
    """Reads the prompts of a batch; returns the logits of the first new token, fp32 [B, V].

    Args:
        on_read: called with the hidden states of each chunk, [B, L, D]; `rows.tokens` counts the chunk already.
    """
    longest = max(map(len, prompts))
    tokens_BL = torch.zeros(len(prompts), longest, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        tokens_BL[row, longest - len(prompt) :] = torch.as_tensor(prompt)
    h_BLD = None
    for h_BLD in rows.chunks(tokens_BL.to(rows.batch.device)):
        if on_read is not None:
            on_read(h_BLD)
    assert h_BLD is not None
    return rows.decoder.logits(h_BLD[:, -1:])[:, -1]


def encode_prompt(tokenizer: Tokenizer, text: str, chat: bool = False) -> list[int]:
    """A prompt's tokens in the form the model was trained on: the start token, if the tokenizer has one, then the text. With
    `chat`, the text is a user's message in the tokenizer's chat template (Llama 3's if it has none).

    Raises:
        ConfigError: a message that the template rejects.
    """
    if chat:
        try:
            return chat_template(InstructionData(), tokenizer).prompt_tokens([{"role": "user", "content": text}])
        except UnusableRow as error:
            raise ConfigError(f"The chat template does not take this prompt: {error}.") from error
    return ([] if tokenizer.bos_id is None else [tokenizer.bos_id]) + tokenizer.encode(text)


def warn_of_long_prompts(loaded: LoadedModel, prompts: Sequence[Sequence[int]]) -> None:
    """Warns on stderr of prompts longer than the trained length, unless the model has an extension."""
    longest = max(map(len, prompts), default=0)
    warn_of_length(loaded, f"a prompt has {longest:,} tokens", longest)


def warn_of_length(loaded: LoadedModel, what: str, length: int) -> None:
    """Warns on stderr of texts that are longer than the trained length, unless the model has an extension.

    Args:
        what: a clause that says where the length comes from.

    Raises:
        ConfigError: a length that the model has no positions for.
    """
    loaded.decoder.check_length(length)
    trained = loaded.trained_length
    if length > trained and loaded.decoder.extension is None:
        print(
            f"warning: {what}, and {loaded.path} was trained on sequences of {trained:,}: expect "
            "worse text past that length, or set --extend (docs/inference/extensions.md)",
            file=sys.stderr,
        )
