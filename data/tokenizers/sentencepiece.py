"""Sentencepiece models: trains ones that preserve every text, reads any, and converts them to `tokenizer.json`."""

import io
import re
from collections.abc import Iterable, Iterator
from functools import cached_property
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from typing import Any

from farsight.data.order import hash64, shuffled
from farsight.data.tokenizers.base import BOS, EOS, UNK, Tokenizer
from farsight.data.tokenizers.huggingface import CONFIG_FILE, GENERATION_FILE, template_in, write_config, write_fast
from farsight.errors import DataError
from farsight.json_files import read_object

MODEL_FILE = "tokenizer.model"

SPACE = "▁"
"""U+2581, sentencepiece's character for a space."""

_FEWEST = 300
_SENTENCE_BYTES = 2000
_PROBE_TURNS = 8


class SentencePieceTokenizer(Tokenizer):
    """A sentencepiece model."""

    def __init__(self, path: str | Path):
        """`path`: tokenizer.model, with tokenizer_config.json, generation_config.json and a chat template beside it where they
        exist.

        Raises `DataError` for any other file.
        """
        import sentencepiece

        path = Path(path)
        self._model, config = path.read_bytes(), path.parent / CONFIG_FILE
        if not self._model:
            raise DataError(f"{path} is empty. Copy the file again.")
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=self._model)
        except RuntimeError as error:
            raise DataError(
                f"{path}: not a sentencepiece model. (The tokenizer.model that comes with Llama 3 is tiktoken's: use the "
                "tokenizer.json of its Hugging Face release.)"
            ) from error
        self._settings = read_object(config) if config.is_file() else {}
        self.chat_template = template_in(path.parent)
        generation = path.parent / GENERATION_FILE
        self._generation = generation.read_bytes() if generation.is_file() else None
        proto = _parse(self._model)
        self.one_token_a_byte = _keeps_text(proto)
        self.growth = (1, 0) if self.one_token_a_byte else _growth(proto)
        self.fingerprint = blake2b(self._model, digest_size=16).hexdigest()
        # Sentencepiece writes spaces as U+2581, so a U+2581 in the text would be decoded as a space.
        self._space_ids = [self._processor.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE.encode()]
        self.vocab_size = self._processor.vocab_size()
        self.bos_id, self.eos_id = (i if i >= 0 else None for i in (self._processor.bos_id(), self._processor.eos_id()))
        control = (i for i in self.vocabulary if self._processor.is_control(i) or self._processor.is_unknown(i))
        self.special_tokens = {self.vocabulary[i]: i for i in control}

    def _encode(self, text: str) -> list[int]:
        first, *rest = text.split(SPACE) if self.one_token_a_byte else [text]
        ids = self._processor.encode(first)
        for part in rest:
            ids += [*self._space_ids, *self._processor.encode(part)]
        return ids

    def _decode(self, ids: list[int]) -> str:
        return self._processor.decode(ids)

    def save(self, directory: str | Path) -> None:
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        (directory / MODEL_FILE).write_bytes(self._model)
        bos, eos = self.special_token(self.bos_id), self.special_token(self.eos_id)
        if (fast := to_fast_tokenizer(self._model)) is not None:
            write_fast(directory, fast, "sentencepiece", bos, eos)
        else:
            # transformers then builds the tokenizer from the model itself, with the settings of this file.
            usual = {"tokenizer_class": "LlamaTokenizer", "bos_token": bos, "eos_token": eos, "legacy": False}
            ours = {"add_bos_token": self.bos_id is not None, "farsight_kind": "sentencepiece"}
            write_config(directory, usual | self._settings | ours)
        self._save_template(directory)
        if self._generation is not None:  # it may list end tokens
            (directory / GENERATION_FILE).write_bytes(self._generation)

    @cached_property
    def vocabulary(self) -> dict[int, str]:
        return {i: self._processor.id_to_piece(i) for i in range(self.vocab_size)}

    def _byte_sizes(self, ids: list[int]) -> list[int]:
        if not self.one_token_a_byte:
            raise DataError(
                "this tokenizer.model rewrites its input, so its tokens can't be assigned to turns. "
                "Use the tokenizer.json of the same model."
            )
        return [self._piece_sizes[i] for i in ids]

    @cached_property
    def _piece_sizes(self) -> list[int]:
        """Bytes of text that each piece stands for."""
        texts = (piece.replace(SPACE, " ") for piece in self.vocabulary.values())
        return [1 if self._processor.is_byte(i) else len(text.encode()) for i, text in enumerate(texts)]


def train_sentencepiece(texts: Iterable[str], vocab_size: int, directory: str | Path) -> SentencePieceTokenizer:
    """Trains a BPE model whose decode(encode(text)) is the text, and saves it in a new directory.

    Characters without a piece of their own are spelled in bytes, no whitespace is added, merged or dropped, and runs of spaces
    and line ends can be pieces. The same texts in the same order give the same bytes. Ids: unknown (never used), bos, eos, the
    256 bytes, then the pieces. Raises `DataError` if the texts can't fill the vocabulary.
    """
    import sentencepiece

    if vocab_size < _FEWEST:
        raise DataError(f"vocab_size = {vocab_size}: 256 bytes and 3 special tokens come first; set {_FEWEST} or more.")
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
        raise DataError(_why_not(vocab_size, str(error))) from error
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / MODEL_FILE).write_bytes(model.getvalue())
    tokenizer = SentencePieceTokenizer(directory / MODEL_FILE)
    tokenizer.save(directory)
    return tokenizer


def _why_not(vocab_size: int, error: str) -> str:
    """The sentence about a vocabulary that a text can't fill, or that can't hold its characters, from sentencepiece's error."""
    option = "--vocab-size (tokenizer.vocab_size)"
    if least := re.search(r"smaller than required_chars\. \d+ vs (\d+)", error):
        return f"vocab_size = {vocab_size} is too small for the characters of this text: set {option} to {least[1]} or more."
    if most := re.search(r"size too high .* value <= (\d+)", error):
        lower = f"set {option} to {most[1]} or less, or " if int(most[1]) >= _FEWEST else ""
        return f"vocab_size = {vocab_size} is too large for this text, which fills {most[1]}: {lower}give more text."
    return f"a sentencepiece model of vocab_size = {vocab_size} can't be trained on this text: {error}"


def _keeps_text(proto: Any) -> bool:
    """True if decode(encode(text)) returns the text, as with models from `train_sentencepiece` and unlike Llama 2's."""
    normalizer = proto.normalizer_spec
    return (
        bool(proto.trainer_spec.byte_fallback)
        and normalizer.name == "identity"
        and not normalizer.add_dummy_prefix
        and not normalizer.remove_extra_whitespaces
    )


def _growth(proto: Any) -> tuple[int, int] | None:
    """`Tokenizer.growth` of a model that at most adds a space and merges spaces, as Llama 2's does; None for other models."""
    known = proto.normalizer_spec.name == "identity" and any(piece.piece == SPACE for piece in proto.pieces)
    return (1, int(proto.normalizer_spec.add_dummy_prefix)) if known else None


def to_fast_tokenizer(model: bytes) -> Any | None:
    """Converts a model to a `tokenizers.Tokenizer`; None if that would not encode exactly as sentencepiece does.

    Only BPE models that preserve the text are converted (unigram models resolve ties differently), and the result is first
    compared with sentencepiece on shuffled sequences of its own pieces.
    """
    import sentencepiece
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    proto = _parse(model)
    if not _keeps_text(proto) or proto.trainer_spec.model_type != proto.trainer_spec.BPE:
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
