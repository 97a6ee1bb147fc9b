"""Documents to learn retrieval from: the command of `farsight needles`.

Half of the documents have one passkey, the others several with names, at any depth. Questions with their answers stand
anywhere after them, one of them at the end: what is found close by is learned first, and helps with the rest. An eighth are `passkey`
samples as they are evaluated. Every document has, with bos and eos, exactly the tokens asked for, so that in training with
this sequence length each fills a row and none is cut between a passkey and its question.
"""

import argparse
import json
from collections.abc import Sequence
from itertools import count
from pathlib import Path

from farsight.cli import bounded, command
from farsight.data.order import hash64
from farsight.data.retrieval.needles import (
    INTRODUCTION,
    INTRODUCTION_OF_MANY,
    Haystack,
    Sample,
    asked,
    count_tokens,
    draw_names,
    fit,
    fraction,
    needle,
    passkeys,
    prompt,
)
from farsight.data.sources.documents import DataError
from farsight.data.tokenizers.tokenizer import BytesTokenizer, Tokenizer, load_tokenizer_dir
from farsight.files import prepare_file
from farsight.progress import progress

_HELP = """\
Writes documents that teach a small model to retrieve: text with passkeys in it, questions for them, and the answers.
A line of the file is {"text": …}, as [[data.sources]] kind = "jsonl" reads it.

  farsight needles --out needles.jsonl --documents 1000 --tokens 512 --seed 0
  farsight needles --out needles.jsonl --documents 1000 --tokens 128 --tokenizer tokenizers/needles --same 8

With --same, the text around the passkeys is soon known by heart, and to retrieve is all that is left to learn: small models
learn it many times sooner. It is to go before documents without. Every document has exactly --tokens tokens, bos and eos counted: train with this sequence length, and none is cut.
The same options give the same file.
"""

_MOST_NAMES = 8
_FEW = 2
"""Sentences of haystack that there are at least, as far as the length allows."""
_MISFITS = 1000
"""Documents in a row that miss the length before this gives up."""


def document(seed: int, tokenizer: Tokenizer, tokens: int, text: str | None = None, questions: int = 12) -> str | None:
    """One document of `tokens` tokens, with bos and eos where the tokenizer has them; None where this seed has none of
    exactly this length.

    Args:
        text: of the haystack; None has it made up.
        questions: the most that there are; which of them fit, and how many are wanted, differs from document to document.

    Raises:
        DataError: the length is too short for a passkey and its question.
    """
    haystack = Haystack(seed, text)
    tokens -= tokenizer.eos_id is not None
    one = hash64(seed, 1) % 2 == 0
    names = [()] if one else [(name,) for name in draw_names(haystack, 2 + hash64(seed, 2) % (_MOST_NAMES - 1))]
    needles = [
        (fraction(seed, 3, i), name, number)
        for i, (name, number) in enumerate(zip(names, passkeys(haystack, len(names)), strict=True))
    ]
    # Questions and answers at any depth after their needles; none in a fourth of the documents.
    asked_again = []
    for turn in range(hash64(seed, 4) % questions if hash64(seed, 5) % 4 else 0):
        depth, name, number = needles[hash64(seed, 6, turn) % len(needles)]
        later = depth + (1 - depth) * fraction(seed, 7, turn)
        asked_again.append((later, f"{asked(*name)} {number}."))

    def build(sentences: Sequence[str]) -> Sample:
        _, name, number = needles[0]
        placed = [(depth, needle(number, *name)) for depth, name, number in needles] + asked_again
        return prompt(INTRODUCTION if one else INTRODUCTION_OF_MANY, sentences, placed, asked(*name), number)

    # What leaves no room for some sentences of haystack is left out.
    while (asked_again or len(needles) > 1) and count_tokens(build(haystack.sentences(_FEW)), tokenizer) > tokens:
        (asked_again or needles).pop()
    sample = fit(haystack, build, tokenizer, tokens)
    whole = f"{sample.prompt} {sample.answers[0]}."
    return whole if (tokenizer.bos_id is not None) + len(tokenizer.encode(whole)) == tokens else None


@command
def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="farsight needles", description=_HELP, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the .jsonl file to write")
    parser.add_argument("--documents", type=bounded(int, least=1), required=True, metavar="N", help="how many")
    parser.add_argument("--tokens", type=bounded(int, least=1), required=True, help="of each, bos and eos counted")
    parser.add_argument("--seed", type=bounded(int, least=0), default=0, help="makes up the documents (0)")
    parser.add_argument("--tokenizer", type=Path, metavar="DIR", help="that counts the tokens (default: bytes)")
    parser.add_argument(
        "--same",
        type=bounded(int, least=0),
        default=0,
        metavar="N",
        help="all text is of the same N sentences (default: new ones)",
    )
    parser.add_argument(
        "--questions", type=bounded(int, least=1), default=12, metavar="N", help="the most in a document (12)"
    )
    options = parser.parse_args(arguments)
    prepare_file(options.out)
    tokenizer = load_tokenizer_dir(options.tokenizer) if options.tokenizer else BytesTokenizer()
    missed = _write(options, tokenizer)
    print(f"{options.out}: {options.documents:,} documents of {options.tokens:,} tokens; {missed:,} missed the length")


def _write(options: argparse.Namespace, tokenizer: Tokenizer) -> int:
    """Writes the documents; returns how many more were left out for their length."""
    written = missed = in_a_row = 0
    haystack = " ".join(Haystack(options.seed).sentences(options.same)) if options.same else None
    bar = progress(total=options.documents, desc="Documents", unit="document")
    with open(options.out, "w", encoding="utf-8") as file, bar:
        for number in count():
            text = document(hash64(options.seed, number), tokenizer, options.tokens, haystack, options.questions)
            in_a_row = in_a_row + 1 if text is None else 0
            missed += text is None
            if in_a_row == _MISFITS:
                raise DataError(f"no sentences fill {options.tokens:,} tokens exactly; try another --tokens.")
            if text is None:
                continue
            file.write(json.dumps({"text": text}) + "\n")
            written += 1
            bar.update()
            if written == options.documents:
                break
    return missed
