"""Token files of Megatron-LM and OLMo: written by their published layouts, and read against a reader of the same documents."""

import csv
import gzip
import random
import re
import struct
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pytest

from farsight.configs.schema import Data, ShardsSource
from farsight.data.order import EpochOrder, hash64
from farsight.data.packing import IGNORE
from farsight.data.sample import sample_documents, sample_texts
from farsight.data.shards.megatron import MegatronFile
from farsight.data.sources import token_files
from farsight.data.sources.build import open_source
from farsight.data.tokenizers.tokenizer import BytesTokenizer
from farsight.errors import DataError
from tests.data.test_shards import BYTES, G, L, batches, loaders

BOS, EOS = 256, 257
HELD_OUT, SEED = 0.2, 3
LEAST, MOST = 3, 90
CODES = {"u1": 1, "i2": 3, "i4": 4, "i8": 5, "u2": 8}

Documents = list[list[int]]


def documents(name: str, number: int = 60) -> Documents:
    """Some are empty, shorter or longer than the filters, or copies."""
    drawn = random.Random(name)
    found = [[drawn.randrange(256) for _ in range(drawn.randrange(120))] for _ in range(number)]
    return [*found, *found[: number // 6]]


def write_megatron(prefix: Path, sequences: Sequence[Documents], kind: str = "i4") -> None:
    """The files of documents, each of which is a list of sequences."""
    lengths = [len(one) for document in sequences for one in document]
    size = np.dtype(kind).itemsize
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, CODES[kind], len(lengths), len(sequences) + 1)
    index += struct.pack(f"<{len(lengths)}i", *lengths)
    index += struct.pack(f"<{len(lengths)}q", *(size * sum(lengths[:i]) for i in range(len(lengths))))
    ends = np.cumsum([0, *(len(document) for document in sequences)])
    index += struct.pack(f"<{len(ends)}q", *ends)
    Path(f"{prefix}.idx").write_bytes(index)
    tokens = [token for document in sequences for one in document for token in one]
    np.array(tokens, f"<{kind}").tofile(f"{prefix}.bin")


def write_olmo(path: Path, content: Documents, table: bool) -> None:
    np.array([token for document in content for token in document], "<u2").tofile(path)
    if table:
        with gzip.open(path.with_suffix(".csv.gz"), "wt", newline="") as file:
            end = 0
            for number, document in enumerate(content):
                start, end = end, end + len(document)
                csv.writer(file).writerow([start, end, f'id "{number}",\n', "a,b.jsonl.gz", number])


def megatron_of_sentences(folder: Path) -> tuple[str, Documents]:
    """Documents of no, one or several sequences and with eod, in two types."""
    first, second = documents("first"), documents("second")
    cut = [[one[:5], one[5:6], [*one[6:], EOS]] if one else [] for one in first]
    write_megatron(folder / "a", cut, "i4")
    write_megatron(folder / "b", [[one] for one in second], "u2")
    return str(folder / "*.bin"), first + second


def megatron_prefix(folder: Path) -> tuple[str, Documents]:
    content = documents("prefix")
    write_megatron(folder / "my.text_document", [[[BOS, *one, EOS]] for one in content], "i8")
    return str(folder / "my.text_document"), content


def olmo_searched(folder: Path) -> tuple[str, Documents]:
    """Documents that end with eos, the last one without."""
    first, second = documents("first"), documents("second")
    write_olmo(folder / "a.npy", [[*one, EOS] for one in first], table=False)
    write_olmo(folder / "b.npy", [*([BOS, *one, EOS] for one in second), [7] * 20], table=False)
    return str(folder / "*.npy"), [*first, *second, [7] * 20]


def olmo_tabled(folder: Path) -> tuple[str, Documents]:
    """Boundaries that eos does not show; the glob matches the tables too."""
    first, second = documents("first"), documents("second")
    write_olmo(folder / "a.npy", first, table=True)
    write_olmo(folder / "b.npy", [[*one, EOS] for one in second], table=True)
    return str(folder / "*"), first + second


def olmo_with_header(folder: Path) -> tuple[str, Documents]:
    content = documents("header")
    np.save(folder / "a.npy", np.array([token for one in content for token in [*one, EOS]], ">i8"))
    return str(folder / "a.npy"), content


FORMATS = [megatron_of_sentences, megatron_prefix, olmo_searched, olmo_tabled, olmo_with_header]


def data(path: str | Path, **filters: int) -> Data:
    return Data(sources=(ShardsSource(path=str(path), **filters),), held_out=HELD_OUT, seed=SEED)


def written_out(content: Documents, split: str, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and labels [steps, G, L]: each lane reads its documents in turn, joins them and cuts them into rows."""
    order = EpochOrder([len(content)], hash64(SEED, 0))
    wanted = []
    for ids in content:
        digest = blake2b(struct.pack(f"<{len(ids)}I", *ids), digest_size=8).digest()
        held_out = int.from_bytes(digest, "big") / 2**64 < HELD_OUT
        wanted.append(LEAST <= len(ids) <= MOST and held_out == (split == "validation"))
    inputs, labels = np.empty((steps, G, L), int), np.empty((steps, G, L), int)
    for lane in range(G):
        stream, targets, item = [], [], lane
        while len(stream) < steps * L:
            _, row = order.row(item)
            if wanted[row]:
                document = [BOS, *content[row], EOS]
                stream += document
                targets += [*document[1:], IGNORE]
            item += G
        inputs[:, lane] = np.array(stream[: steps * L]).reshape(steps, L)
        labels[:, lane] = np.array(targets[: steps * L]).reshape(steps, L)
    return inputs, labels


def assert_batches(found, expected) -> None:
    assert np.array_equal([step["input"].numpy() for step in found], expected[0])
    assert np.array_equal([step["labels"].numpy() for step in found], expected[1])


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("split", ["train", "validation"])
@pytest.mark.parametrize("write", FORMATS)
def test_batches_are_those_of_the_documents(tmp_path, write, split, ranks):
    path, content = write(tmp_path)
    config = data(path, min_tokens=LEAST, max_tokens=MOST)
    found = batches(loaders(config, ranks, split=split), 30)
    assert_batches(found, written_out(content, split, 30))


@pytest.mark.parametrize("write", FORMATS)
def test_resumed_on_another_number_of_ranks(tmp_path, write):
    path, content = write(tmp_path)
    config = data(path, min_tokens=LEAST, max_tokens=MOST)
    before = loaders(config, 4)
    found, state = batches(before, 13), {}
    for rank in before:
        state |= rank.state_dict()
    after = loaders(config, 2)
    for rank in after:
        rank.load_state_dict(state)
    assert_batches(found + batches(after, 17), written_out(content, "train", 30))


def read(path: str | Path, tokenizer=BYTES) -> Documents:
    source = open_source(ShardsSource(path=str(path)), 0, "train", 0, tokenizer=tokenizer)
    return [document.ids.tolist() for document in source.documents()]


def test_bos_and_eos_come_off_once_at_each_end(tmp_path):
    ends = [[BOS, BOS, 1, EOS, 2, EOS, EOS], [BOS], [EOS], [BOS, EOS], [EOS, 1, BOS], [3]]
    write_megatron(tmp_path / "a", [[one] for one in ends], "u2")
    assert read(tmp_path / "a.bin") == [[BOS, 1, EOS, 2, EOS], [EOS, 1, BOS], [3]]


def test_bos_that_is_eos(tmp_path):
    class OneToken(BytesTokenizer):
        bos_id = EOS

    write_olmo(tmp_path / "a.npy", [[EOS, 1, 2, EOS], [EOS, 3, EOS]], table=False)
    assert read(tmp_path / "a.npy", OneToken()) == [[1, 2], [3]]


def test_paths_of_a_pair(tmp_path):
    write_megatron(tmp_path / "a-1", [[[1, 2]]])
    write_megatron(tmp_path / "a", [[[3]], [[4]]])
    assert read(tmp_path / "a") == read(tmp_path / "a.bin") == read(tmp_path / "a.idx") == [[3], [4]]
    assert read(tmp_path / "*.bin") == read(tmp_path / "*.idx") == read(tmp_path / "a*") == [[1, 2], [3], [4]]


def test_an_empty_file_among_others(tmp_path):
    write_megatron(tmp_path / "a", [])
    write_megatron(tmp_path / "b", [[], []])
    write_megatron(tmp_path / "c", [[], [[1]], []])
    assert read(tmp_path / "*.bin") == [[1]]
    write_olmo(tmp_path / "a.npy", [], table=True)
    write_olmo(tmp_path / "b.npy", [], table=False)
    write_olmo(tmp_path / "c.npy", [[2], []], table=True)
    np.zeros(100, "<u2").tofile(tmp_path / "d.npy")  # as dolma leaves a file that it had no documents for
    (tmp_path / "d.csv.gz").write_bytes(gzip.compress(b""))
    assert read(tmp_path / "*.npy") == [[2]]
    with pytest.raises(DataError, match="no documents; every file is empty"):
        read(tmp_path / "[ab].npy")


def test_documents_outside_the_filter_are_not_hashed(tmp_path, monkeypatch):
    content = documents("hashed")
    content[:2] = [1] * 60, [1] * 80
    write_megatron(tmp_path / "a", [[[BOS, *one, EOS]] for one in content])
    hashed, text_hash = [], token_files.text_hash
    monkeypatch.setattr(token_files, "text_hash", lambda raw: hashed.append(len(raw) // 4) or text_hash(raw))
    source = open_source(
        ShardsSource(path=str(tmp_path / "a"), min_tokens=60, max_tokens=80), 0.2, "train", 0, tokenizer=BYTES
    )
    list(source.documents())
    assert sorted(hashed) == sorted(len(one) for one in content if 60 <= len(one) <= 80)


def test_changed_files_are_noticed_at_a_resume(tmp_path):
    path, _ = olmo_tabled(tmp_path)
    (rank,) = loaders(data(path), 1)
    batches([rank], 1)
    state = rank.state_dict()
    (tmp_path / "b.csv.gz").unlink()
    (other,) = loaders(data(path), 1)
    with pytest.raises(DataError, match=r"b\.csv\.gz is gone"):
        other.load_state_dict(state)


def test_fewer_documents_than_rows_of_a_batch(tmp_path):
    content = [[*range(250)], [*range(100)]]
    write_megatron(tmp_path / "a", [[[*one, EOS]] for one in content], "u2")
    (rank,) = loaders(replace(data(tmp_path / "a"), held_out=0.0), 1)
    found = batches([rank], 20)
    rows = [np.concatenate([step["input"][row].numpy() for step in found]) for row in range(G)]
    assert len({row[0] for row in rows}) == G  # each lane begins with another part
    assert {token for row in rows for token in row.tolist()} == {*range(250), BOS, EOS}


def test_texts(tmp_path):
    write_megatron(tmp_path / "a", [[[*"Grüße".encode(), EOS]]])
    config = replace(data(tmp_path / "a"), held_out=0.0)
    assert [sample.document.text for sample in sample_documents(config, BYTES, "train")] == ["Grüße"]
    with pytest.raises(DataError, match=r"mean nothing without the tokenizer .* set tokenizer\.path"):
        list(sample_texts(config, 100))


def test_ids_outside_the_vocabulary(tmp_path):
    write_megatron(tmp_path / "a", [[[1] * 9]] * 9 + [[[1, 300]]])
    (rank,) = loaders(replace(data(tmp_path / "a"), held_out=0.0), 1)
    with pytest.raises(DataError, match=r"a\.bin document 9: token id 300 is outside .* set architecture\.vocab_size"):
        batches([rank], 9)


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (
            lambda idx, ids: (b"TNTIDX\x00\x00\x00" + idx[9:], ids),
            r"a\.idx: not an index of Megatron-LM.*match its \.idx",
        ),
        (lambda idx, ids: (idx[:20], ids), r"a\.idx: not an index of Megatron-LM"),
        (lambda idx, ids: (b"", ids), r"a\.idx: not an index of Megatron-LM"),
        (lambda idx, ids: (idx[:9] + b"\x02" + idx[10:], ids), r"a\.idx: version 2 .* tools/preprocess_data\.py"),
        (lambda idx, ids: (idx[:17] + b"\x07" + idx[18:], ids), r"type 7 of token ids"),
        (lambda idx, ids: (idx[:-8], ids), r"a\.idx: 106 bytes, but 4 sequences in 3 documents need 114\. Copy it"),
        (lambda idx, ids: (idx + b"\x00" * 4, ids), "multimodal data"),
        (
            lambda idx, ids: (idx, ids[:-4]),
            r"a\.idx does not belong to .*a\.bin, which has 6 tokens of int32.* Copy both",
        ),
        (lambda idx, ids: (idx, ids[:-1]), r"a\.bin: 27 bytes are no whole number of int32.* was cut short\.$"),
        (lambda idx, ids: (idx[:-8] + struct.pack("<q", 3), ids), "does not belong"),
    ],
)
def test_damaged_megatron_files(tmp_path, damage, match):
    write_megatron(tmp_path / "a", [[[1, 2, 3], [4]], [[5, 6]], [[7]]])
    index, tokens = damage((tmp_path / "a.idx").read_bytes(), (tmp_path / "a.bin").read_bytes())
    (tmp_path / "a.idx").write_bytes(index)
    (tmp_path / "a.bin").write_bytes(tokens)
    with pytest.raises(DataError, match=match):
        MegatronFile(str(tmp_path / "a"))


@pytest.mark.parametrize(
    ("place", "wrong"),
    [(90, -4), (90, 4), (98, 5), (98, 1), (66, 400), (66, -8)],  # where document 1 begins and ends; its byte in .bin
)
def test_a_damaged_entry_of_the_index_is_found_when_it_is_read(tmp_path, place, wrong):
    write_megatron(tmp_path / "a", [[[1, 2, 3], [4]], [[5, 6]], [[7]]])
    assert [bound.tolist() for bound in MegatronFile(str(tmp_path / "a")).bounds(np.array([1]))] == [[4], [6]]
    index = bytearray((tmp_path / "a.idx").read_bytes())
    struct.pack_into("<q", index, place, wrong)
    (tmp_path / "a.idx").write_bytes(index)
    with pytest.raises(DataError, match="does not belong"):
        MegatronFile(str(tmp_path / "a")).bounds(np.array([1]))


def test_other_files_are_refused(tmp_path):
    write_megatron(tmp_path / "a", [[[1]]])
    (tmp_path / "a.idx").unlink()
    with pytest.raises(DataError, match=r"there is no .*/a\.idx beside .*/a\.bin;"):
        read(tmp_path / "a.bin")
    (tmp_path / "a.bin").rename(tmp_path / "b.idx")
    with pytest.raises(DataError, match=r"there is no .*/b\.bin beside .*/b\.idx;"):
        read(tmp_path / "b.idx")
    (tmp_path / "a.jsonl").write_text("{}")
    with pytest.raises(
        DataError, match=r"a\.jsonl is neither a pair of Megatron-LM's files, \.bin and \.idx, nor OLMo's"
    ):
        read(tmp_path / "*.jsonl")
    with pytest.raises(DataError, match="no such file"):
        read(tmp_path / "none*")
    with pytest.raises(DataError, match=r"no manifest\.json .* to its end\.$"):
        read(tmp_path)


@pytest.mark.parametrize("suffix", [".bin", ".npy"])
def test_a_folder_of_token_files_is_read_by_a_glob(tmp_path, suffix):
    write = {
        ".bin": lambda: write_megatron(tmp_path / "a", [[[1, 2]]]),
        ".npy": lambda: np.save(tmp_path / "a", [1, EOS]),
    }
    write[suffix]()
    with pytest.raises(DataError, match=r"no manifest\.json") as error:
        read(tmp_path)
    (glob,) = re.findall(r'path = "(.*?)"', str(error.value))
    assert read(Path(glob)) == [[1, 2] if suffix == ".bin" else [1]]


def test_the_tokens_of_shards_are_not_taken_for_token_files(tmp_path):
    (tmp_path / "manifest.json").touch()
    (tmp_path / "tokens").mkdir()
    np.save(tmp_path / "tokens/00000-000.npy", [1, EOS])
    with pytest.raises(DataError, match=rf"no manifest\.json .* {tmp_path} is one\.$"):
        read(tmp_path / "tokens")


def test_damaged_olmo_files(tmp_path):
    path, table = tmp_path / "a.npy", tmp_path / "a.csv.gz"
    path.write_bytes(b"123")
    with pytest.raises(DataError, match=r"a\.npy: 3 bytes are no whole number of uint16.*, or use the tokenizer"):
        read(path)
    np.array([*range(40), EOS], "<u4").tofile(path)
    for _ in ("searched", "tabled"):
        with pytest.raises(DataError, match=r"every second id is 0 if it is read as uint16.*numpy\.save"):
            read(path)
        table.write_bytes(gzip.compress(b"0,41\n"))
    table.unlink()
    np.array([1, 2, 3], "<u2").tofile(path)
    with pytest.raises(DataError, match=r"a\.npy: no eos \(id 257\) in its 3 tokens"):
        read(path)
    np.save(path, np.ones((2, 2)))
    with pytest.raises(DataError, match="an array of float64 in 2 dimensions"):
        read(path)
    path.write_bytes(path.read_bytes()[:60])
    with pytest.raises(DataError, match=r"a\.npy: can't be read .*Copy the file again"):
        read(path)
    write_olmo(path, [[1], [2, 3]], table=True)
    whole = path.read_bytes()
    path.write_bytes(whole[:-2])
    with pytest.raises(
        DataError, match=r"a\.csv\.gz: its documents end at token 3, and .*a\.npy has 2 tokens of uint16"
    ):
        read(path)
    path.write_bytes(whole)
    packed = table.read_bytes()
    for damaged in (packed[:-9], b"text", gzip.compress(b"start,end\n0,3\n"), gzip.compress(b"3\n")):
        table.write_bytes(damaged)
        with pytest.raises(
            DataError, match=r"a\.csv\.gz: not a table of documents .* remove it to have .*a\.npy searched"
        ):
            read(path)


def test_a_search_needs_eos(tmp_path):
    class WithoutEos(BytesTokenizer):
        eos_id = None

    write_olmo(tmp_path / "a.npy", [[1, 2]], table=False)
    with pytest.raises(DataError, match="documents end with eos, which the tokenizer has none of"):
        read(tmp_path / "a.npy", WithoutEos())


def test_the_type_follows_from_the_vocabulary(tmp_path):
    """A vocabulary of 256 ids fits into single bytes, one of 258 does not."""

    class Small(BytesTokenizer):
        vocab_size, bos_id, eos_id = 256, None, 9

    np.array([1, 2, EOS, 3], "<u2").tofile(tmp_path / "wide.npy")
    np.array([1, 2, 9, 3], "u1").tofile(tmp_path / "narrow.npy")
    assert read(tmp_path / "wide.npy") == read(tmp_path / "narrow.npy", Small()) == [[1, 2], [3]]
