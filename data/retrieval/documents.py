"""Documents to learn retrieval from, as `farsight needles` writes them.

Half of the documents hold one passkey, the others several named ones, at any depth. Questions with their answers follow at
any distance, one of them at the end of the document: retrieval is learned first over short distances, which helps with
long ones. One document in eight is a `passkey` sample as the evaluation makes them. Every document has exactly the requested
number of tokens, bos and eos included: trained with that sequence length, it fills a row and is never cut between a passkey
and its question.
"""

import json
from collections.abc import Sequence
from itertools import count
from pathlib import Path

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
from farsight.data.tokenizers.tokenizer import Tokenizer
from farsight.errors import DataError
from farsight.progress import progress

_MOST_NAMES = 8
_FEW = 2
"""Haystack sentences that a document has at least, as far as its length allows."""
_MISFITS = 1000
"""Consecutive documents that may miss the length before `write_documents` gives up."""


def document(seed: int, tokenizer: Tokenizer, tokens: int, text: str | None = None, questions: int = 12) -> str | None:
    """One document of `tokens` tokens, bos and eos included where the tokenizer has them; None if this seed gives none of
    exactly that length.

    Args:
        text: the haystack's text; None makes one up.
        questions: the most questions; the actual number differs between documents, and only those that fit are kept.

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
    # Questions and answers at any depth after their needles; a quarter of the documents have none.
    asked_again = []
    for turn in range(hash64(seed, 4) % questions if hash64(seed, 5) % 4 else 0):
        depth, name, number = needles[hash64(seed, 6, turn) % len(needles)]
        later = depth + (1 - depth) * fraction(seed, 7, turn)
        asked_again.append((later, f"{asked(*name)} {number}."))

    def build(sentences: Sequence[str]) -> Sample:
        _, name, number = needles[0]
        placed = [(depth, needle(number, *name)) for depth, name, number in needles] + asked_again
        return prompt(INTRODUCTION if one else INTRODUCTION_OF_MANY, sentences, placed, asked(*name), number)

    # Drop questions, then needles, until a few haystack sentences fit.
    while (asked_again or len(needles) > 1) and count_tokens(build(haystack.sentences(_FEW)), tokenizer) > tokens:
        (asked_again or needles).pop()
    sample = fit(haystack, build, tokenizer, tokens)
    whole = f"{sample.prompt} {sample.answers[0]}."
    return whole if (tokenizer.bos_id is not None) + len(tokenizer.encode(whole)) == tokens else None


def write_documents(
    path: Path, tokenizer: Tokenizer, documents: int, tokens: int, seed: int = 0, same: int = 0, questions: int = 12
) -> int:
    """Writes a JSON-lines file of documents of `tokens` tokens each; training reads it as a `jsonl` source.

    Args:
        same: sentences of the one text that all documents share; 0 makes up a new text for each.
        questions: as in `document`.

    Returns:
        How many further documents were left out because they missed the length.

    Raises:
        DataError: the length is too short, or hardly any document has exactly that length.
    """
    written = missed = in_a_row = 0
    haystack = " ".join(Haystack(seed).sentences(same)) if same else None
    bar = progress(total=documents, desc="Documents", unit="document")
    with open(path, "w", encoding="utf-8") as file, bar:
        for number in count():
            text = document(hash64(seed, number), tokenizer, tokens, haystack, questions)
            in_a_row = in_a_row + 1 if text is None else 0
            missed += text is None
            if in_a_row == _MISFITS:
                raise DataError(f"no sentences fill {tokens:,} tokens exactly; try another --tokens.")
            if text is None:
                continue
            file.write(json.dumps({"text": text}) + "\n")
            written += 1
            bar.update()
            if written == documents:
                break
    return missed
