"""The loader: the same global batches on any number of ranks, before and after a resume."""

import json
import logging
import random
import re
import threading
import time
from collections import Counter
from dataclasses import replace
from itertools import islice
from pathlib import Path
from random import Random

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.api import CheckpointException

from farsight.checkpoints.resume import saved_order
from farsight.configs.schema import Data, HubSource, JobConfig, JsonlSource
from farsight.data.loader import Loader, build_loader, build_validation_loader
from farsight.data.packing import IGNORE, Packer
from farsight.data.prefetch import Prefetch
from farsight.data.sources import documents, files, streamed
from farsight.data.tokenizers.tokenizer import BytesTokenizer
from farsight.errors import DataError

BYTES = BytesTokenizer()
L, G = 64, 8


@pytest.fixture(scope="module")
def mixed(tmp_path_factory) -> Data:
    """A local source of documents from a few tokens to several rows, and a streamed one of three shards."""
    directory = tmp_path_factory.mktemp("data")
    for name, count, scale in (("local", 50, 7), ("0", 40, 3), ("1", 40, 3), ("2", 5, 40)):
        rows = [{"text": f"{name} {i} " * (1 + i % scale)} for i in range(count)]
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Data(
        sources=(
            JsonlSource(path=str(directory / "local.jsonl"), weight=2, min_tokens=10),
            HubSource(name="json", data_files=f"{directory}/[0-9].jsonl", weight=1),
        ),
        held_out=0.1,
        seed=3,
    )


@pytest.fixture(scope="module")
def fitted(mixed) -> Data:
    """The same; documents of the first source are kept whole."""
    return with_packing(mixed, "best_fit", "cut")


@pytest.fixture(scope="module")
def letters(tmp_path_factory) -> Data:
    """Two sources, one of a and one of b; some documents are longer than a row."""
    directory, random = tmp_path_factory.mktemp("letters"), Random(0)
    for letter, most in (("a", 60), ("b", 150)):
        rows = [{"text": letter * random.randint(1, most)} for _ in range(400)]
        (directory / f"{letter}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sources = tuple(JsonlSource(path=str(directory / f"{letter}.jsonl"), weight=3 - i) for i, letter in enumerate("ab"))
    return Data(sources=sources, held_out=0.0)


def with_packing(config: Data, *kinds: str) -> Data:
    sources = (replace(source, packing=kind) for source, kind in zip(config.sources, kinds, strict=True))
    return replace(config, sources=tuple(sources))


def loader(config: Data, rank: int = 0, ranks: int = 1, micro: int = 1, **changes) -> Loader:
    sizes = {"seq_len": L, "vocab_size": 258, "global_batch_size": G, "micro_batch_size": micro} | changes
    return Loader(config, BYTES, dp_rank=rank, dp_world_size=ranks, **sizes)


def loaders(config: Data, ranks: int, micro: int = 1) -> list[Loader]:
    return [loader(config, rank, ranks, micro) for rank in range(ranks)]


def global_batches(ranks: list[Loader], steps: int) -> list[dict[str, torch.Tensor]]:
    """The next global batches, assembled from all ranks' micro-batches."""
    of_ranks = [list(islice(rank, steps * rank.micro_batches_per_step)) for rank in ranks]
    batches = []
    for step in range(steps):
        parts = []
        for rank, got in zip(ranks, of_ranks, strict=True):
            n = rank.micro_batches_per_step
            parts += [inputs | {"labels": labels} for inputs, labels in got[step * n : (step + 1) * n]]
        batches.append({name: torch.cat([part[name] for part in parts]) for name in parts[0]})
    return batches


def same(left: list[dict[str, torch.Tensor]], right: list[dict[str, torch.Tensor]]) -> None:
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        assert a.keys() == b.keys()
        for name in a:
            for row in range(G):
                assert torch.equal(a[name][row], b[name][row]), (name, row)


def padded(batch: dict[str, torch.Tensor]) -> tuple[list[torch.Tensor], int]:
    """The rows of a batch without padding, and the tokens of it: the last document of a row, if it is all eos."""
    rows, padding = [], 0
    for tokens, starts in zip(batch["input"], batch["document_starts"], strict=True):
        begin = int(starts[-1])
        begin = begin if (tokens[begin:] == BYTES.eos_id).all() else L
        rows.append(tokens[:begin])
        padding += L - begin
    return rows, padding


def merged_state(ranks: list[Loader]) -> dict[str, str]:
    """The state that DCP saves from all ranks: the union, in which equal keys have equal values."""
    state: dict[str, str] = {}
    for rank in ranks:
        for key, value in rank.state_dict().items():
            assert state.setdefault(key, value) == value
    return state


class TestBatches:
    def test_shapes_and_types(self, mixed):
        inputs, labels = next(iter(loader(mixed, micro=2)))
        assert {name: (tuple(t.shape), t.dtype) for name, t in inputs.items()} == {
            "input": ((2, L), torch.int64),
            "positions": ((2, L), torch.int64),
            "document_starts": ((2, L), torch.int32),
        }
        assert (labels.shape, labels.dtype) == ((2, L), torch.int64)

    @pytest.mark.parametrize("packing", ["mixed", "fitted"])
    @pytest.mark.parametrize(("ranks", "micro"), [(1, 2), (1, 8), (2, 1), (2, 4), (4, 2), (8, 1)])
    def test_global_batches_are_the_same_on_any_number_of_ranks(self, request, packing, ranks, micro):
        config = request.getfixturevalue(packing)
        same(global_batches(loaders(config, ranks, micro), 12), global_batches(loaders(config, 1), 12))

    @pytest.mark.parametrize("kinds", [("best_fit", "cut"), ("cut", "best_fit"), ("best_fit", "best_fit")])
    def test_best_fit_cuts_no_document_that_fits_and_keeps_the_shares(self, letters, kinds):
        whole, tokens = Counter(), Counter()
        for batch in global_batches([loader(with_packing(letters, *kinds))], 120):
            for row, starts in zip(batch["input"], batch["document_starts"], strict=True):
                for start in starts.unique().tolist():
                    piece = row[starts == start].tolist()
                    if letter := "".join(sorted({chr(token) for token in piece if token < 256})):
                        tokens[letter] += len(piece)
                        whole[letter, piece[-1] == BYTES.eos_id or len(piece) == L or piece[0] != BYTES.bos_id] += 1
        assert set(tokens) == {"a", "b"}  # one letter in each document
        assert tokens["a"] / tokens.total() == pytest.approx(0.6, abs=0.04)
        for letter, kind in zip("ab", kinds, strict=True):
            assert whole[letter, True] > 100
            assert (whole[letter, False] == 0) == (kind == "best_fit")

    def test_padding_and_cuts_are_those_of_the_step_delivered(self, mixed):
        config = with_packing(mixed, "best_fit", "best_fit")
        ranks = loaders(config, 2, micro=2)
        running = [iter(rank) for rank in ranks]
        for batch in global_batches([loader(config)], 20):
            for batches in running:
                list(islice(batches, 2))
            _, of_padding = padded(batch)
            assert sum(rank.packed.padding for rank in ranks) == of_padding
            # A document that is cut has a label at the end of its row.
            assert sum(rank.packed.cut for rank in ranks) == int((batch["labels"][:, -1] != IGNORE).sum())

    def test_best_fit_needs_masked_documents(self, fitted):
        with pytest.raises(DataError, match=r'sources\[0\].*packing = "best_fit".*Set data.mask_documents = true, or'):
            loader(replace(fitted, mask_documents=False))

    def test_other_seeds_give_other_batches(self, mixed):
        (a,), (b,) = global_batches([loader(mixed)], 1), global_batches([loader(replace(mixed, seed=4))], 1)
        assert not torch.equal(a["input"], b["input"])

    def test_documents_are_masked_or_not(self, mixed):
        (masked,) = global_batches([loader(mixed)], 1)
        (plain,) = global_batches([loader(replace(mixed, mask_documents=False))], 1)
        assert torch.equal(masked["input"], plain["input"])
        assert (masked["labels"] == IGNORE).any()
        assert masked["document_starts"].any()
        ends = masked["input"] == BYTES.eos_id
        assert torch.equal(masked["labels"] == IGNORE, ends)
        assert torch.equal(plain["labels"][:, :-1], plain["input"][:, 1:])
        assert not plain["document_starts"].any()

    def test_no_document_is_read_by_two_lanes_in_an_epoch(self, tmp_path):
        path = tmp_path / "a.jsonl"
        path.write_text("".join(json.dumps({"text": f"{i:04d}"}) + "\n" for i in range(400)))
        config = Data(sources=(JsonlSource(path=str(path)),), held_out=0.0)
        # Six tokens per document, with bos and eos: 10 documents per row, 80 per step, and 400 in five steps.
        batches = global_batches([loader(config, seq_len=60)], 10)
        for epoch in (batches[:5], batches[5:]):
            rows = torch.cat([batch["input"] for batch in epoch])
            documents = Counter(bytes(document[1:5].tolist()).decode() for document in rows.reshape(-1, 6))
            assert documents == Counter(f"{i:04d}" for i in range(400))

    def test_long_documents_are_cut_and_nothing_is_lost(self, tmp_path):
        text = "".join(chr(33 + i % 90) for i in range(1000))
        (tmp_path / "a.jsonl").write_text(json.dumps({"text": text}) + "\n")
        config = Data(sources=(JsonlSource(path=str(tmp_path / "a.jsonl")),), held_out=0.0)
        batches = global_batches([loader(config, global_batch_size=1)], 20)
        run = torch.cat([batch["input"][0] for batch in batches])
        labels = torch.cat([batch["labels"][0] for batch in batches])
        document = torch.tensor([256, *text.encode(), 257])
        assert torch.equal(run[:1002], document)
        assert torch.equal(labels[:1001], document[1:])
        assert labels[1001] == IGNORE
        assert batches[0]["positions"][0].tolist() == batches[1]["positions"][0].tolist() == list(range(L))

    def test_epochs_are_counted_and_logged_once(self, tmp_path, caplog):
        (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": "x" * 62}) + "\n" for _ in range(G * 2)))
        config = Data(sources=(JsonlSource(path=str(tmp_path / "a.jsonl")),), held_out=0.0)
        with caplog.at_level(logging.INFO):
            batches = loader(config)
            global_batches([batches], 6)  # one document per row, so two steps per epoch
        passes = [int(re.findall(r"pass (\d+) over it begins", record.getMessage())[0]) for record in caplog.records]
        assert passes[:2] == [2, 3]
        assert len(passes) == len(set(passes))
        assert batches.epochs[0] in (2, 3)  # the background thread may have begun the fourth

    @pytest.mark.parametrize(
        ("sizes", "words"),
        [
            ({"global_batch_size": 6, "micro_batch_size": 4}, "6 rows .* micro-batches of 4 on 1 .* multiple of 4 × 1"),
            ({"global_batch_size": 0}, "global batch of 0"),
            ({"seq_len": 0}, "training.seq_len = 0"),
        ],
    )
    def test_sizes_that_do_not_divide(self, mixed, sizes, words):
        with pytest.raises(DataError, match=words):
            loader(mixed, **sizes)


class TestResume:
    @pytest.mark.parametrize("packing", ["mixed", "fitted"])
    @settings(max_examples=12, deadline=None)
    @given(step=st.integers(0, 30), before=st.sampled_from([1, 2, 4]), after=st.sampled_from([1, 2, 4, 8]))
    def test_next_batches_are_the_same_on_another_number_of_ranks(self, request, packing, step, before, after):
        config = request.getfixturevalue(packing)
        undisturbed = global_batches(loaders(config, 1), step + 4)
        saving = loaders(config, before, micro=2)
        same(global_batches(saving, step), undisturbed[:step])
        state = merged_state(saving)
        resumed = loaders(config, after)
        for rank in resumed:
            own = {key: state[key] for key in rank.state_dict()}
            rank.load_state_dict(own)
        same(global_batches(resumed, 4), undisturbed[step:])

    @pytest.mark.parametrize("kind", ["masked", "unmasked", "best_fit"])
    def test_every_step_of_a_run(self, mixed, kind):
        config = with_packing(mixed, "best_fit", "best_fit") if kind == "best_fit" else mixed
        config = replace(config, mask_documents=kind != "unmasked")
        undisturbed = global_batches([loader(config)], 12)
        state = loader(config).state_dict()
        for step in range(12):
            again = loader(config)
            again.load_state_dict(state)
            same(global_batches([again], 1), undisturbed[step : step + 1])
            state = again.state_dict()

    def test_iterating_again_goes_on_and_ends_the_older_iteration(self, mixed):
        undisturbed = global_batches([loader(mixed)], 4)
        running = loader(mixed)
        first = iter(running)
        for _ in range(G):
            next(first)
        same(global_batches([running], 3), undisturbed[1:])
        with pytest.raises(RuntimeError, match="ended by a newer one"):
            next(first)
        running.rewind()
        same(global_batches([running], 2), undisturbed[:2])

    def test_state_is_of_the_last_whole_step_delivered(self, mixed):
        running = loader(mixed, micro=2)
        batches = iter(running)
        start = running.state_dict()
        for _ in range(3):  # of a step's four micro-batches
            next(batches)
            time.sleep(0.02)  # time for the background thread to run ahead
            assert running.state_dict() == start
        next(batches)
        assert running.state_dict() != start

    def test_a_checkpoint_from_before_packing_had_a_pool(self, letters):
        """It had the place before the document that was being packed, and a number of its tokens."""
        config = replace(letters, sources=letters.sources[:1])
        (expected, _) = global_batches([loader(config)], 2)
        running = loader(config)
        old = running.state_dict()
        order = json.loads(old["order"])
        del order["data.sources[0].packing"]
        old["order"] = json.dumps(order)
        for lane in range(G):
            first = expected["document_starts"][lane] == 0
            start = {"mixture": {"drawn": [0], "readers": [[0]]}, "offset": int(first.sum())}
            old[f"lane_{lane:05d}"] = json.dumps(start)
        running.load_state_dict(old)
        (batch,) = global_batches([running], 1)
        for lane in range(G):
            begin = json.loads(old[f"lane_{lane:05d}"])["offset"]
            assert torch.equal(batch["input"][lane, : L - begin], expected["input"][lane, begin:])
        with pytest.raises(DataError, match=r"sources\[0\].packing was cut, is best_fit"):
            loader(with_packing(config, "best_fit")).load_state_dict(old)

    def test_the_state_of_a_lane_is_small(self, mixed):
        running = loader(with_packing(mixed, "best_fit", "best_fit"))
        global_batches([running], 20)
        assert max(map(len, running.state_dict().values())) < 2000

    def test_empty_state_starts_from_the_first_batch(self, mixed):
        running = loader(mixed)
        first = global_batches([running], 1)
        running.load_state_dict({})
        same(global_batches([running], 1), first)

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"global_batch_size": 4}, ["training.global_batch_size was 8, is 4"]),
            ({"seq_len": 32}, ["training.seq_len was 64, is 32"]),
            ({"config": {"seed": 9}}, ["data.seed was 3, is 9"]),
            ({"config": {"mask_documents": False}}, ["data.mask_documents was True, is False"]),
            ({"weight": 5}, ["data.sources[0].weight was 2, is 5"]),
            ({"min_tokens": 11, "seq_len": 32}, ["min_tokens was 10, is 11", "seq_len was 64, is 32"]),
        ],
    )
    def test_state_of_another_order_is_refused(self, mixed, change, words):
        state = loader(mixed).state_dict()
        config = replace(mixed, **change.pop("config", {}))
        source = {key: change.pop(key) for key in ("weight", "min_tokens") if key in change}
        config = replace(config, sources=(replace(config.sources[0], **source), *config.sources[1:]))
        with pytest.raises(DataError, match="begin a new order, as a new stage does") as error:
            loader(config, **change).load_state_dict(state)
        for word in words:
            assert word in str(error.value)

    def test_changed_files_and_tokenizers_are_refused_and_moved_files_are_not(self, mixed, tmp_path):
        state = loader(mixed).state_dict()
        content = Path(mixed.sources[0].path).read_text()
        moved = tmp_path / "moved.jsonl"
        moved.write_text(content)
        config = replace(mixed, sources=(replace(mixed.sources[0], path=str(moved)), mixed.sources[1]))
        loader(config).load_state_dict(state)
        loader(replace(config, on_bad_row="skip")).load_state_dict(state)
        moved.write_text(content + '{"text": "one more"}\n')
        with pytest.raises(DataError, match=r"the rows of data.sources\[0\] was 50, is 51"):
            loader(config).load_state_dict(state)

        class Other(BytesTokenizer):
            fingerprint = "other"

        other = Loader(
            mixed, Other(), seq_len=L, vocab_size=258, global_batch_size=G, micro_batch_size=1, dp_rank=0, dp_world_size=1
        )  # fmt: skip
        with pytest.raises(DataError, match=r"the tokenizer \(fingerprint\) was bytes, is other"):
            other.load_state_dict(state)


@pytest.mark.filterwarnings("ignore::UserWarning")
class TestCheckpoint:
    """Through torch's distributed checkpoint, as a run's checkpoints nest the loader in it."""

    @pytest.fixture
    def saved(self, mixed, tmp_path):
        ranks = loaders(mixed, 4)
        global_batches(ranks, 7)
        dcp.save({"dataloader": merged_state(ranks)}, checkpoint_id=tmp_path / "step-7")
        return tmp_path / "step-7"

    @pytest.mark.parametrize("ranks", [1, 2, 8])
    def test_resharded_resume(self, mixed, saved, ranks):
        resumed = loaders(mixed, ranks)
        for rank in resumed:
            rank.check_order(saved_order(saved))
            dcp.load({"dataloader": rank}, checkpoint_id=saved)
        same(global_batches(resumed, 3), global_batches(loaders(mixed, 1), 10)[7:])

    def test_another_global_batch_size(self, mixed, saved):
        for size in (4, 16):
            with pytest.raises(DataError, match=f"training.global_batch_size was 8, is {size}"):
                loader(mixed, global_batch_size=size).check_order(saved_order(saved))
        with pytest.raises(CheckpointException, match="Missing key"):
            dcp.load({"dataloader": loader(mixed, global_batch_size=16)}, checkpoint_id=saved)


class TestValidation:
    @pytest.fixture
    def job(self, mixed) -> JobConfig:
        job = JobConfig(data=replace(mixed, held_out=0.3))
        job.training.global_batch_size, job.training.local_batch_size, job.training.seq_len = 8, 2, 48
        job.validation.steps, job.validation.local_batch_size, job.validation.seq_len = 3, 8, L
        return job

    def batches(self, validation) -> list[dict[str, torch.Tensor]]:
        return [inputs | {"labels": labels} for inputs, labels in validation]

    @pytest.mark.parametrize("ranks", [1, 2, 4])
    def test_the_same_first_batches_at_every_pass_and_on_any_number_of_ranks(self, job, ranks):
        parts = []
        for rank in range(ranks):
            validation = build_validation_loader(job, BYTES, rank, ranks)
            once = self.batches(validation)
            assert len(once) == len(validation) == 3
            for a, b in zip(once, self.batches(validation), strict=True):
                assert all(torch.equal(a[name], b[name]) for name in a)
            assert validation.state_dict() == {}
            parts.append(once)
        together = [torch.cat([part[step]["input"] for part in parts]) for step in range(3)]
        expected = self.batches(build_validation_loader(job, BYTES, 0, 1))
        assert all(torch.equal(a, b["input"]) for a, b in zip(together, expected, strict=True))

    def test_no_held_out_document_is_trained_on(self, job, tmp_path):
        path = tmp_path / "a.jsonl"
        path.write_text("".join(json.dumps({"text": f"{i:06d}"}) + "\n" for i in range(200)))
        job = replace(job, data=Data(sources=(JsonlSource(path=str(path)),), held_out=0.3))

        def texts(batches) -> set[str]:
            return {bytes(d[1:7].tolist()).decode() for b in batches for d in b["input"].reshape(-1, 8)}

        training = build_loader(job, BYTES, 0, 1)
        trained = texts(self.batches(islice(training, 100)))
        held_out = texts(self.batches(build_validation_loader(job, BYTES, 0, 1)))
        assert len(trained) + len(held_out) > 190
        assert not trained & held_out

    def test_micro_batches_never_ask_for_more_than_a_ranks_share(self, job):
        job.validation.local_batch_size = 3
        validation = build_validation_loader(job, BYTES, 1, 2)
        assert [inputs["input"].shape[0] for inputs, _ in validation] == [2] * 6

    @pytest.mark.parametrize("source", [JsonlSource, lambda path, **of: HubSource(name="json", data_files=path, **of)])
    def test_behind_a_length_filter_little_is_read(self, job, tmp_path, monkeypatch, source):
        """One document in 20 passes the filter. Of the others none is hashed or tokenised, and no row is read for two lanes."""
        draw = random.Random(0)
        texts = [f"{i} ".ljust(400 if draw.random() < 0.05 else draw.randrange(50, 250), "x") for i in range(4000)]
        path = tmp_path / "a.jsonl"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        job.data = Data(sources=(source(path=str(path), min_tokens=300),), held_out=0.3)
        hashed, tokenised, read = [], [], []
        split_of, encode, text_of = documents.split_of, BytesTokenizer.encode_array, documents.text_of
        monkeypatch.setattr(documents, "split_of", lambda text, share: hashed.append(text) or split_of(text, share))
        monkeypatch.setattr(
            BytesTokenizer, "encode_array", lambda self, text: tokenised.append(text) or encode(self, text)
        )
        for module in (files, streamed):
            monkeypatch.setattr(module, "text_of", lambda *row: read.append(row[3]) or text_of(*row))
        tables, opened = streamed.StreamedDataset._tables, []
        monkeypatch.setattr(
            streamed.StreamedDataset, "_tables", lambda self, shard: opened.append(shard) or tables(self, shard)
        )
        job.validation.steps = 2
        validation = build_validation_loader(job, BYTES, 0, 1)
        found = self.batches(validation)
        held_out = [text for text in texts if len(text) == 400 and split_of(text.encode(), 0.3) == "validation"]
        # Two rows of 64 tokens in each of 8 lanes are the beginnings of 8 documents.
        assert {bytes(row[1:].tolist()).decode() for row in found[0]["input"]} <= {text[: L - 1] for text in held_out}
        assert len(tokenised) == G
        assert all(len(text) == 400 for text in hashed)
        assert len(hashed) < 200
        assert len(read) == len({*read})
        if source is JsonlSource:
            assert len(read) == len(hashed)
        else:
            assert opened == [0, 0]  # to see whether there are fewer rows than lanes, then for all lanes

    def test_nothing_is_read_beyond_the_last_batch(self, job, monkeypatch):
        job.validation.steps = 2
        validation = build_validation_loader(job, BYTES, 0, 1)
        filled = []
        fill = Packer.fill
        monkeypatch.setattr(Packer, "fill", lambda self, rows, i: filled.append(i) or fill(self, rows, i))
        assert len(self.batches(validation)) == len(validation)
        time.sleep(0.3)
        assert len(filled) == 2 * G

    def test_endless_validation_is_refused(self, job):
        job.validation.steps = -1
        with pytest.raises(DataError, match=r"validation.steps = -1.*set the number of batches"):
            build_validation_loader(job, BYTES, 0, 1)


class TestBuild:
    def test_sizes_come_from_the_config(self):
        job = JobConfig()
        job.training.local_batch_size, job.training.seq_len, job.training.global_batch_size = 2, 32, -1
        inputs, _ = next(iter(build_loader(job, BYTES, 1, 3)))
        assert inputs["input"].shape == (2, 32)
        assert build_loader(job, BYTES, 1, 3).micro_batches_per_step == 1
        job.training.global_batch_size = 12
        assert build_loader(job, BYTES, 1, 3).micro_batches_per_step == 2


class TestPrefetch:
    def test_error_in_the_data_surfaces_after_the_batches_before_it(self, tmp_path):
        path = tmp_path / "a.jsonl"
        path.write_text("".join(json.dumps({"text": "x" * 62}) + "\n" for _ in range(G * 3)) + "nope\n")
        running = loader(Data(sources=(JsonlSource(path=str(path)),), held_out=0.0))
        with pytest.raises(DataError, match=f"{path}:25: bad JSON") as error:
            list(islice(running, 1000))
        assert "read_row" in [entry.name for entry in error.traceback]

    def test_skips_are_reported(self, tmp_path):
        path = tmp_path / "a.jsonl"
        path.write_text("".join(json.dumps({"text": "x" * 62}) + "\n" for _ in range(G)) + "nope\n")
        config = Data(sources=(JsonlSource(path=str(path)),), held_out=0.0, on_bad_row="skip")
        running = loader(config)
        list(islice(running, 20 * G))
        assert running.skipped == {f"data.sources[0], jsonl source '{path}'": {"bad JSON": 1}}

    def test_order_and_end(self):
        assert list(Prefetch(iter(range(100)), 3)) == list(range(100))

    def test_runs_ahead_no_further_than_asked(self):
        taken = []
        items = Prefetch((taken.append(i) or i for i in range(100)), 2)
        next(items)
        time.sleep(0.1)
        assert len(taken) == 4  # one delivered, two ready, one being made by the thread
        items.close()

    @pytest.mark.parametrize(("micro", "ahead"), [(1, G), (G, 2)])
    def test_reads_ahead_a_whole_step_and_two_micro_batches(self, mixed, micro, ahead):
        running = loader(mixed, micro=micro)
        batches = iter(running)  # dropping it would end it
        next(batches)
        ready, end = running._running._ready, time.monotonic() + 20
        while not ready.full() and time.monotonic() < end:
            time.sleep(0.01)
        assert ready.qsize() == ready.maxsize == ahead
        running.close()

    def test_batches_for_gpus_are_pinned(self, mixed, monkeypatch):
        """A stand-in for `pin_memory`, which needs a GPU."""
        pinned = []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: pinned.append(self.clone()) or pinned[-1])
        running = loader(mixed)
        inputs, labels = next(iter(running))
        running.close()
        assert len(inputs) == 3
        assert all(any(tensor is one for one in pinned) for tensor in (*inputs.values(), labels))
        monkeypatch.undo()
        expected, same_labels = next(iter(loader(mixed)))
        assert torch.equal(labels, same_labels)
        assert all(torch.equal(inputs[name], expected[name]) for name in inputs)

    def test_thread_ends_with_its_iteration(self, mixed):
        before = threading.active_count()
        running = loader(mixed)
        batches = iter(running)
        next(batches)
        assert threading.active_count() == before + 1
        running.close()
        assert threading.active_count() == before
        del batches
        dropped = iter(loader(mixed))
        next(dropped)
        del dropped
        assert threading.active_count() == before
