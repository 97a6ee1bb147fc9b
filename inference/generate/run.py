"""The work of `farsight generate`: its prompts, the processes that divide the model, and what is printed and written."""

import argparse
import dataclasses
import io
import json
import os
import sys
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from farsight.configs.finetuning import InstructionData
from farsight.data.instructions.chat import chat_template
from farsight.data.texts import read_texts
from farsight.errors import ConfigError
from farsight.files import write_text
from farsight.inference.decoder import Usage
from farsight.inference.generate.completions import encode_prompt, generate, warn_of_long_prompts
from farsight.inference.loading import load
from farsight.inference.sampling import Sampling
from farsight.parallel.device import default_device
from farsight.parallel.tensor import shard_for_decoding
from farsight.progress import progress
from farsight.remote import shown


def run(options: argparse.Namespace) -> None:
    """Generates what the options ask for, on every process of a torchrun; the first one prints and writes."""
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
        divide = partial(shard_for_decoding, mesh=mesh)
    loaded = load(options.model_dir, options, divide)
    first = int(os.environ.get("RANK", "0")) == 0
    prompts = [encode_prompt(loaded.tokenizer, text, options.chat) for text in texts]
    alone = len(prompts) == 1

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # the terminal's encoding may lack characters

    def stream(number: int, piece: str) -> None:
        print(piece, end="", flush=True)

    if first:
        warn_of_long_prompts(loaded, prompts)
    ends = loaded.end_tokens
    if options.chat:
        ends = loaded.end_tokens_of_chat(chat_template(InstructionData(), loaded.tokenizer))
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
            end_tokens=ends,
        )
    usage = loaded.decoder.usage
    if mesh is not None:  # each rank holds a part of the heads
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
        content = {"model": shown(options.model_dir), "completions": rows, "usage": dataclasses.asdict(usage)}
        # UTF-8 cannot encode half a surrogate pair, which bytes may spell: it is written as a JSON escape.
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
            f"--prompts {options.prompts} must end in .jsonl; --prompt-file takes a text file that is one prompt."
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
