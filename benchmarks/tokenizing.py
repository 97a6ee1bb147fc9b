"""The longest time that another thread can't run while a long text is tokenised.

    python -m benchmarks.tokenizing [--megabytes 1] [--tokenizer DIRECTORY] [--json F]

The loader tokenises in a thread, and a kernel can't be launched while that thread holds the interpreter's lock. Here a second
thread sleeps for 0.2 ms at a time and records how much later it wakes up; "nothing" is what the machine itself adds. The calls take
turns in one process: `encode` of the tokenizers library, which loaders used to call; `encode_batch_fast` with the whole text;
`encode_array`, which they call now; and packing the ids into rows of 8,192 tokens. The ids of all are compared first. The
text is this Python's standard library; the tokenizer, if none is named, byte-level BPE trained on it.
"""

import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from tokenizers import Tokenizer as Fast
from tokenizers import models, pre_tokenizers, trainers

from farsight.cli import command, new_parser, positive
from farsight.data.packing import Drawn, Packer, Rows
from farsight.data.sources.files import stdlib_files
from farsight.data.tokenizers.huggingface import FAST_FILE, HuggingFaceTokenizer
from farsight.errors import DataError
from farsight.outputs import add_json_option, write_json

NOTHING, ENCODE, BATCH, OURS, PACKING = "nothing", "encode", "encode_batch_fast", "encode_array", "packing"
VOCABULARY, ROW = 8192, 8192
SLEEP = 0.0002


def read_text(size: int) -> str:
    """The first `size` bytes of the standard library's files, repeated if that is not enough."""
    parts: list[str] = []
    while sum(map(len, parts)) < size:
        parts += [path.read_text(encoding="utf-8", errors="ignore") for _, path in stdlib_files()[:200]]
    return "".join(parts).encode()[:size].decode("utf-8", "ignore")


def train(text: str, directory: Path) -> HuggingFaceTokenizer:
    """Byte-level BPE, as Llama 3 and GPT have."""
    fast = Fast(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    fast.train_from_iterator(
        [text], trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=alphabet, show_progress=False)
    )
    fast.save(str(directory / FAST_FILE))
    return HuggingFaceTokenizer(directory / FAST_FILE)


def longest_block(work: Callable[[], Any]) -> tuple[float, float]:
    """Seconds that `work` takes, and the most that another thread woke up late meanwhile."""
    late, awake, done = [0.0], threading.Event(), threading.Event()

    def sleeper() -> None:
        while not done.is_set():
            asleep = time.perf_counter()
            time.sleep(SLEEP)
            late.append(time.perf_counter() - asleep - SLEEP)
            awake.set()

    thread = threading.Thread(target=sleeper)
    thread.start()
    awake.wait()
    started = time.perf_counter()
    work()
    taken = time.perf_counter() - started
    done.set()
    thread.join()
    return taken, max(late)


def pack(ids: np.ndarray) -> None:
    rows = Rows.empty(max(1, len(ids) // ROW), ROW)
    packer = Packer(lambda: Drawn(ids, []), mask_documents=True, padding_id=0, best_fit_share=0)
    for row in range(len(rows.inputs)):
        packer.fill(rows, row)


def measure(tokenizer: HuggingFaceTokenizer, text: str, rounds: int) -> dict[str, Any]:
    """The shortest longest block and the median time of `rounds` turns of each call.

    Raises:
        RuntimeError: the calls give different ids.
    """
    fast = tokenizer._fast
    calls: dict[str, Callable[[], np.ndarray]] = {
        ENCODE: lambda: np.array(fast.encode(text, add_special_tokens=False).ids, np.int64),
        BATCH: lambda: np.array(fast.encode_batch_fast([text], add_special_tokens=False)[0].ids, np.int64),
        OURS: lambda: tokenizer.encode_array(text),
    }
    ids = {name: call() for name, call in calls.items()}
    for name in (BATCH, OURS):
        if not np.array_equal(ids[name], ids[ENCODE]):
            raise RuntimeError(f"{name} and {ENCODE} give different ids")
    work: dict[str, Callable[[], Any]] = {
        NOTHING: lambda: time.sleep(0.5),
        **calls,
        PACKING: lambda: pack(ids[OURS]),
    }
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in work}
    for _ in range(rounds):
        for name, call in work.items():
            found[name].append(longest_block(call))
    tokens = len(ids[OURS])
    rows = []
    for name, times in found.items():
        seconds = statistics.median(taken for taken, _ in times)
        rows.append(
            {
                "what": name,
                "longest_block_ms": 1e3 * min(block for _, block in times),  # other work on the machine only adds
                "tokens_per_second": None if name == NOTHING else tokens / seconds,
                "seconds": seconds,
            }
        )
    return {"rows": rows, "bytes": len(text.encode()), "tokens": tokens, "rounds": rounds}


@command
def main(arguments: list[str] | None = None) -> None:
    parser = new_parser("python -m benchmarks.tokenizing", __doc__)
    parser.add_argument("--megabytes", type=positive, default=1, help="size of the text (default: 1)")
    parser.add_argument("--rounds", type=positive, default=5, help="turns of each call (default: 5)")
    parser.add_argument("--tokenizer", type=Path, help="directory with a tokenizer.json")
    add_json_option(parser)
    options = parser.parse_args(arguments)
    text = read_text(options.megabytes * 10**6)
    if options.tokenizer is not None and not (options.tokenizer / FAST_FILE).is_file():
        raise DataError(f"--tokenizer {options.tokenizer}: no {FAST_FILE} in it.")
    with TemporaryDirectory() as folder:
        named = options.tokenizer
        tokenizer = HuggingFaceTokenizer(named / FAST_FILE) if named else train(text[: 1 << 20], Path(folder))
        result = measure(tokenizer, text, options.rounds)
    print(f"{'':<20}{'longest block, ms':>18}{'tokens/s':>14}")
    for row in result["rows"]:
        speed = "" if row["tokens_per_second"] is None else f"{row['tokens_per_second']:,.0f}"
        print(f"{row['what']:<20}{row['longest_block_ms']:>18.1f}{speed:>14}")
    print(
        f"{result['bytes']:,} bytes, {result['tokens']:,} tokens; {options.rounds} rounds: the shortest of the longest blocks, the median speed"
    )
    write_json(options.json, result)


if __name__ == "__main__":
    main()
