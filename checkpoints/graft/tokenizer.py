"""The tokenizer that the two models of a graft share."""

from pathlib import Path

from farsight.data.tokenizers.tokenizer import Tokenizer, find_tokenizer_dir, load_tokenizer_dir
from farsight.errors import ConfigError


def common_tokenizer(front: Path, back: Path) -> tuple[Tokenizer | None, list[str]]:
    """The tokenizer of both models: the front model's if both have one, None if neither has.

    Special tokens may differ in name: later models give reserved ones a use.

    Returns:
        The tokenizer, and remarks on differences.

    Raises:
        ConfigError: the vocabularies differ in other tokens.
    """
    folders = [find_tokenizer_dir(directory) for directory in (front, back)]
    a, b = (None if folder is None else load_tokenizer_dir(folder) for folder in folders)
    if a is None or b is None:
        return a or b, []
    if a.fingerprint == b.fingerprint:
        return a, []
    unlike = {i: (a.vocabulary.get(i), b.vocabulary.get(i)) for i in a.vocabulary.keys() | b.vocabulary.keys()}
    unlike = {i: tokens for i, tokens in sorted(unlike.items()) if tokens[0] != tokens[1]}
    special = [{*tokenizer.special_tokens.values()} for tokenizer in (a, b)]
    ordinary = [
        i
        for i, tokens in unlike.items()
        if any(t is not None and i not in s for t, s in zip(tokens, special, strict=True))
    ]
    if ordinary:
        first, number = ordinary[0], len(ordinary)
        raise ConfigError(
            f"The models' vocabularies differ in {number:,} {'token' if number == 1 else 'tokens'}: token {first} is "
            f"{unlike[first][0]!r} in {front} and {unlike[first][1]!r} in {back}."
        )
    if not unlike:
        return a, [
            "The tokenizers have the same vocabulary and differ in something else; the front model's is written."
        ]
    names = ", ".join(f"{i} is {x!r} and {y!r}" for i, (x, y) in list(unlike.items())[:3])
    more = f", and {len(unlike) - 3} more" * (len(unlike) > 3)
    return a, [f"Special tokens differ ({names}{more}); the front model's are written."]
