"""Text from a model.

    farsight generate MODEL_DIR --prompt "def main("
    farsight generate runs/X/checkpoint/step-1000 --prompts FILE.jsonl --json F --temperature 0.8 --top-p 0.95
    torchrun --nproc_per_node 4 -m farsight generate MODEL_DIR --prompt-file BOOK.txt     # a model too large for one GPU

Takes model directories of every kind, adapters and checkpoints. A prompt is read in chunks; each key/value head keeps only
what the widest scope among its query heads can still see, and the bytes of the cache are printed beside those of one that
keeps everything. Prompts of a batch may differ in length: each row comes out as it would alone.
"""

import argparse
import dataclasses
import io
import json
import os
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from tqdm import tqdm

from farsight.cli import bounded, command, positive
from farsight.configs.check import ConfigError
from farsight.configs.finetuning import InstructionData
from farsight.data.instructions.chat import chat_template
from farsight.data.instructions.conversations import UnusableRow
from farsight.data.texts import read_texts
from farsight.data.tokenizers.tokenizer import Tokenizer
from farsight.files import write_text
from farsight.inference.decoder import Decoder, Rows, Usage
from farsight.inference.model_options import LoadedModel, add_model_options, load
from farsight.inference.sampling import GREEDY, Sampling, choose
from farsight.inference.text_stream import TextStream
from farsight.outputs import check_outputs
from farsight.parallel.device import default_device
from farsight.parallel.tensor import divide_to_decode
from farsight.progress import progress


@dataclass(frozen=True)
class Completion:
    """What a model wrote after a prompt."""

    tokens: tuple[int, ...]
    """As they were drawn, the end token included."""
    text: str
    """Up to the stop string, which is left out."""
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
) -> list[Completion]:
    """Goes on after each prompt until an end token, a stop string, or `new_tokens` tokens.

    Args:
        prompts: token ids, one or more each.
        rows_at_once: prompts that are read together, those of like length.
        on_text: called with a prompt's number and each piece of its text, as soon as it is certain.
        bar: moved on by the tokens of prompts that are read; closed when `on_text` is called first.
        end_tokens: in place of the tokenizer's.

    Raises:
        ConfigError: an empty prompt, or a model whose logits are not finite.
    """
    for n, prompt in enumerate(prompts):
        if not len(prompt):
            raise ConfigError(f"prompt {n} has no tokens; write at least one character.")
    streams = [TextStream(tokenizer, prompt, stop, end_tokens) for prompt in prompts]
    order = sorted(range(len(prompts)), key=lambda number: len(prompts[number]))
    batches = [
        numbers[i : i + rows_at_once]
        for numbers in decoder.alike(order, [len(prompts[n]) + new_tokens for n in order])
        for i in range(0, len(numbers), rows_at_once)
    ]
    for numbers in batches:
        rows, started = decoder.start([len(prompts[n]) for n in numbers], new_tokens), time.perf_counter()
        logits_BV = _read(rows, [prompts[n] for n in numbers], bar)
        if on_text is not None and bar is not None:
            bar.close()  # the line is the text's from here on
        generators, usage = sampling.generators(numbers), decoder.usage
        for step in range(new_tokens):
            # A model's vocabulary may be rounded up; there is no text for the rest of it.
            tokens_B = choose(logits_BV[:, : tokenizer.vocab_size], sampling, generators)
            if step == 0:  # the first choice waited for the prompt
                usage.seconds_reading += time.perf_counter() - started
                started = time.perf_counter()
            for n, token in zip(numbers, tokens_B.tolist(), strict=True):
                piece = streams[n].push(token)
                if piece and on_text is not None:
                    on_text(n, piece)
            if step % 16 == 0 and bar is not None:
                bar.set_postfix_str(f"{step + 1:,} tokens written")
            if all(streams[n].ended for n in numbers) or step == new_tokens - 1:
                break
            logits_BV = decoder.logits(rows.read(tokens_B[:, None].to(logits_BV.device)))[:, -1]
        usage.seconds_writing += time.perf_counter() - started
        usage.cache_bytes = max(usage.cache_bytes, rows.nbytes)
        usage.dense_cache_bytes = max(usage.dense_cache_bytes, rows.dense_nbytes)
    decoder.usage.tokens_read += sum(map(len, prompts))
    # Reading a prompt gives the first token.
    decoder.usage.tokens_written += sum(max(len(stream.tokens) - 1, 0) for stream in streams)
    completions = []
    for n, stream in enumerate(streams):
        rest = stream.finish()
        if rest and on_text is not None:
            on_text(n, rest)
        completions.append(Completion(tuple(stream.tokens), stream.text, stream.ended or "length"))
    return completions


def _read(rows: Rows, prompts: Sequence[Sequence[int]], bar: tqdm | None) -> Tensor:
    """Reads the prompts of a batch; fp32 [B, V], the logits of the first new token."""
    longest = max(map(len, prompts))
    tokens_BL = torch.zeros(len(prompts), longest, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        tokens_BL[row, longest - len(prompt) :] = torch.as_tensor(prompt)
    h_BLD = None
    for h_BLD in rows.chunks(tokens_BL.to(rows.batch.device)):
        if bar is not None:  # padding, on the left, was read and does not count
            bar.update(sum(min(h_BLD.shape[1], max(0, rows.tokens - start)) for start in rows.batch.starts))
    assert h_BLD is not None
    return rows.decoder.logits(h_BLD[:, -1:])[:, -1]


def encode_prompt(tokenizer: Tokenizer, text: str, chat: bool = False) -> list[int]:
    """A prompt's tokens as the model knows them from training: after the start token, if the tokenizer has one; or, with
    `chat`, as a user's message in the tokenizer's chat template (Llama 3's, if it has none).

    Raises:
        ConfigError: a message that the template refuses.
    """
    if chat:
        try:
            return chat_template(InstructionData(), tokenizer).prompt_tokens([{"role": "user", "content": text}])
        except UnusableRow as error:
            raise ConfigError(f"The chat template does not take this prompt: {error}.") from error
    return ([] if tokenizer.bos_id is None else [tokenizer.bos_id]) + tokenizer.encode(text)


def warn_of_long_prompts(loaded: LoadedModel, prompts: Sequence[Sequence[int]]) -> None:
    """Says so on stderr where prompts are longer than what the model was trained on, and nothing extends it."""
    longest, trained = max(map(len, prompts), default=0), loaded.trained_length
    if longest > trained and loaded.decoder.extension is None:
        print(
            f"warning: a prompt has {longest:,} tokens, and {loaded.path} was trained on sequences of {trained:,}: expect "
            "worse text past that length, or set --extend (docs/inference/extensions.md)",
            file=sys.stderr,
        )


@command
def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="farsight generate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model_dir", type=Path, help="model directory, adapter, or step-N folder of a checkpoint")
    prompts = parser.add_mutually_exclusive_group(required=True)
    prompts.add_argument("--prompt", action="append", metavar="TEXT", help="may be given several times")
    prompts.add_argument(
        "--prompt-file", type=Path, metavar="FILE", help="a text that is one prompt, - for standard input"
    )
    prompts.add_argument("--prompts", type=Path, metavar="FILE", help='.jsonl, a "prompt" a line')
    parser.add_argument("--chat", action="store_true", help="a prompt is a user's message: use the chat template")
    parser.add_argument("--new-tokens", type=positive, default=128, help="most tokens to write (%(default)s)")
    parser.add_argument(
        "--temperature", type=bounded(float, least=0), default=0.0, help="0 (default) takes the most likely token"
    )
    parser.add_argument(
        "--top-p",
        type=bounded(float, above=0, most=1),
        default=1.0,
        help="draw from the likeliest tokens of this sum (1: all)",
    )
    parser.add_argument(
        "--seed", type=bounded(int, least=0, most=2**62), default=0, help="prompt n draws from seed + n (%(default)s)"
    )
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end where this is written")
    parser.add_argument("--rows", type=positive, default=8, help="prompts read together (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="F", help="write completions and figures here too")
    add_model_options(parser)
    options = parser.parse_args(arguments)
    if options.top_p < 1 and not options.temperature:
        parser.error("--top-p goes with a --temperature above 0, such as 0.8: at 0 the most likely token is taken")
    check_outputs(parser, options)
    try:
        _run(options, int(os.environ.get("WORLD_SIZE", "1")))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _run(options: argparse.Namespace, world: int) -> None:
    if world > 1 and str(options.prompt_file) == "-":
        raise ConfigError("--prompt-file - is read by one process alone; write the prompt to a file for several.")
    texts, sampling = _prompts(options), Sampling(options.temperature, options.top_p, options.seed)
    divide = mesh = None
    if world > 1:
        mesh = init_device_mesh(torch.device(options.device or default_device()).type, (world,))
        divide = partial(divide_to_decode, mesh=mesh)
    loaded = load(options.model_dir, options, divide)
    first = int(os.environ.get("RANK", "0")) == 0
    prompts = [encode_prompt(loaded.tokenizer, text, options.chat) for text in texts]
    alone = len(prompts) == 1

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # of what the terminal's encoding does not have

    def stream(number: int, piece: str) -> None:
        print(piece, end="", flush=True)

    if first:
        warn_of_long_prompts(loaded, prompts)
    turn_end = {chat_template(InstructionData(), loaded.tokenizer).turn_end()} if options.chat else set()
    with progress(total=sum(map(len, prompts)), desc="read", unit="token") as bar:
        completions = generate(
            loaded.decoder,
            loaded.tokenizer,
            prompts,
            options.new_tokens,
            sampling,
            options.stop,
            options.rows,
            on_text=stream if alone and first else None,
            bar=bar,
            end_tokens=loaded.end_tokens | turn_end,
        )
    usage = loaded.decoder.usage
    if mesh is not None:  # every rank has a part of the heads
        held = torch.tensor([usage.cache_bytes, usage.dense_cache_bytes], device=mesh.device_type)
        dist.all_reduce(held)
        usage.cache_bytes, usage.dense_cache_bytes = held.tolist()
    if not first:
        return
    if alone:
        print()
    for n, completion in enumerate(() if alone else completions):
        print(f"── {n} · {completion.ended} ──\n{completion.text}")
    print(_summary(usage), file=sys.stderr)
    if options.json:
        rows = [
            {"prompt_tokens": len(prompt), **dataclasses.asdict(completion)}
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
        content = {"model": str(options.model_dir), "completions": rows, "usage": dataclasses.asdict(usage)}
        # Half of a surrogate pair, which bytes may spell and UTF-8 does not have, is written as JSON's own escape of it.
        text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        write_text(options.json, text.encode("utf-8", "backslashreplace").decode("utf-8"))


def _prompts(options: argparse.Namespace) -> list[str]:
    if options.prompt:
        return options.prompt
    if options.prompt_file:
        if str(options.prompt_file) == "-":
            try:
                return [sys.stdin.buffer.read().decode("utf-8")]
            except UnicodeDecodeError as error:
                raise ConfigError(f"standard input is not UTF-8 (byte {error.start}); convert it first.") from None
        return ["\n".join(read_texts(options.prompt_file))]
    if options.prompts.suffix != ".jsonl":
        raise ConfigError(
            f"--prompts {options.prompts} has to end in .jsonl; --prompt-file takes a text that is one prompt."
        )
    return read_texts(options.prompts, "prompt")


def _summary(usage: Usage) -> str:
    def speed(tokens: int, seconds: float) -> str:
        return f"{tokens:,} tokens in {seconds:.2f} s ({tokens / max(seconds, 1e-9):,.0f} a second)"

    share = usage.cache_bytes / max(usage.dense_cache_bytes, 1)
    return (
        f"read {speed(usage.tokens_read, usage.seconds_reading)}, wrote {speed(usage.tokens_written, usage.seconds_writing)}; "
        f"cache {usage.cache_bytes:,} bytes, {share:.3f} of a dense one"
    )


if __name__ == "__main__":
    main()
