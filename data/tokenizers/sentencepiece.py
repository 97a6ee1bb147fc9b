"""Trains sentencepiece models that preserve every text, and converts them to `tokenizer.json`."""

import io
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

from farsight.data.order import hash64, shuffled
from farsight.errors import DataError

SPACE = "▁"
"""U+2581, sentencepiece's character for a space."""

BOS, EOS, UNK = "<|bos|>", "<|eos|>", "<|unk|>"
"""Special tokens of the tokenizers made here."""

_SENTENCE_BYTES = 2000
_PROBE_TURNS = 8


def train_model(texts: Iterable[str], vocab_size: int) -> bytes:
    """Trains a BPE model whose decode(encode(text)) is the text, and returns it serialised.

    Characters without a piece of their own are spelled in bytes, no whitespace is added, merged or dropped, and runs of spaces
    and line ends can be pieces. The same texts in the same order give the same bytes. Ids: unknown (never used), bos, eos, the
    256 bytes, then the pieces. Raises `DataError` if the texts can't fill the vocabulary.
    """
    import sentencepiece

    if vocab_size < 300:
        raise DataError(f"vocab_size = {vocab_size}: 256 bytes and 3 special tokens come first; set 300 or more.")
    sentences = _sentences(texts)
    if (first := next(sentences, None)) is None:
        raise DataError("no text to train a tokenizer on; check the data sources.")
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=chain([first], sentences),
            model_writer=model,
            vocab_size=vocab_size,
            model_type="bpe",
            byte_fallback=True,
            # Not <s> and </s>: source code is full of them, and other libraries find special tokens in a text.
            unk_piece=UNK,
            bos_piece=BOS,
            eos_piece=EOS,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,
            max_sentence_length=1 << 20,
            num_threads=1,  # with several threads the order of summation, and so the model, varies between runs
            minloglevel=2,
        )
    except RuntimeError as error:
        raise DataError(
            f"a sentencepiece model of vocab_size = {vocab_size} can't be trained on this text: {error}. "
            "Lower tokenizer.vocab_size or give more text."
        ) from error
    return model.getvalue()


def keeps_text(model: bytes) -> bool:
    """Whether decode(encode(text)) is the text: true of what `train_model` makes, false of Llama 2's model."""
    proto = _parse(model)
    normalizer = proto.normalizer_spec
    return (
        bool(proto.trainer_spec.byte_fallback)
        and normalizer.name == "identity"
        and not normalizer.add_dummy_prefix
        and not normalizer.remove_extra_whitespaces
    )


def to_fast_tokenizer(model: bytes) -> Any | None:
    """Converts a model to a `tokenizers.Tokenizer`; None if that would not encode exactly as sentencepiece does.

    Only BPE models that preserve the text are converted (unigram models resolve ties differently), and the result is first
    compared with sentencepiece on shuffled sequences of its own pieces.
    """
    import sentencepiece
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    proto = _parse(model)
    if not keeps_text(model) or proto.trainer_spec.model_type != proto.trainer_spec.BPE:
        return None
    pieces = [(piece.piece, piece.score) for piece in proto.pieces]
    vocabulary = {piece: i for i, (piece, _) in enumerate(pieces)}
    unknown = proto.trainer_spec.unk_piece
    core = models.BPE(vocabulary, _merges(pieces, vocabulary), byte_fallback=True, fuse_unk=True, unk_token=unknown)
    fast = Tokenizer(core)
    fast.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="never", split=False)
    fast.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    specials = [piece.piece for piece in proto.pieces if piece.type in (piece.CONTROL, piece.UNKNOWN)]
    fast.add_special_tokens([AddedToken(special, special=True, normalized=False) for special in specials])

    slow = sentencepiece.SentencePieceProcessor(model_proto=model)
    probe = _probe([piece.piece for piece in proto.pieces if piece.type == piece.NORMAL])
    same = fast.encode(probe, add_special_tokens=False).ids == slow.encode(probe)
    return fast if same else None


def _merges(pieces: list[tuple[str, float]], vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """BPE merges in sentencepiece's order: by the score of the resulting piece."""
    merges = []
    for piece, score in pieces:
        splits = [(piece[:i], piece[i:]) for i in range(1, len(piece))]
        known = [(left, right) for left, right in splits if left in vocabulary and right in vocabulary]
        merges += [(-score, vocabulary[left], vocabulary[right], left, right) for left, right in known]
    return [(left, right) for *_, left, right in sorted(merges)]


def _probe(pieces: list[str]) -> str:
    """A text with every piece several times, with different neighbours, and with characters outside all pieces."""
    turns = []
    for turn in range(_PROBE_TURNS):
        turns += [pieces[shuffled(i, len(pieces), hash64(turn))] for i in range(len(pieces))]
        turns += ["日本語 \U0001f642é\r\n\t\x0b  "]
    return "".join(turns).replace(SPACE, " ")


def _parse(model: bytes) -> Any:
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]  # made by protobuf at run time
    proto.ParseFromString(model)
    return proto


def _sentences(texts: Iterable[str]) -> Iterator[str]:
    """Groups of whole lines, of limited size: so pieces such as ")\\n" or an indentation can be learned."""
    for text in texts:
        lines: list[str] = []
        size = 0
        for line in text.splitlines(keepends=True):
            if lines and size + len(line) > _SENTENCE_BYTES:
                yield "".join(lines)
                lines, size = [], 0
            lines.append(line)
            size += len(line)
        if lines:
            yield "".join(lines)
