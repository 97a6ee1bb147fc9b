"""Instruction data: the same global batches on any number of ranks, packed or not, before and after a resume."""

import json
import logging
import re
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st

from farsight.checkpoints.resume import saved_order
from farsight.configs.finetuning import (
    InstructionHub,
    InstructionJsonl,
)
from farsight.configs.schema import Architecture
from farsight.data.instructions.chat import chat_template
from farsight.data.instructions.conversations import to_conversation
from farsight.data.instructions.loader import (
    build_instruction_loader,
    build_instruction_validation_loader,
)
from farsight.data.instructions.plan import best_fit, plan_epoch
from farsight.data.instructions.view import inspect_rows
from farsight.data.order import permutation
from farsight.data.packing import IGNORE
from farsight.errors import DataError
from tests.data.instructions.conftest import (
    BYTES,
    G,
    L,
    alpaca,
    build,
    global_batches,
    job,
    micro_batches,
    one_row,
    write,
)


def documents(batch: dict[str, torch.Tensor]) -> list[tuple]:
    """(tokens, labels, positions) of each document of a batch, padding included."""
    found = []
    for tokens, labels, positions, starts in zip(
        *(batch[name].tolist() for name in ("input", "labels", "positions", "document_starts")), strict=True
    ):
        edges = [*sorted(set(starts)), len(tokens)]
        for begin, end in pairwise(edges):
            assert set(starts[begin:end]) == {begin}
            found.append((tuple(tokens[begin:end]), tuple(labels[begin:end]), tuple(positions[begin:end])))
    return found


def conversations(batches: list[dict[str, torch.Tensor]]) -> Counter:
    """Documents with trained tokens."""
    return Counter(d for batch in batches for d in documents(batch) if any(label != IGNORE for label in d[1]))


def steps_of(loaders, steps: int) -> list:
    """The data of the next steps, to be compared: packed rows in order, others as the conversations of each step."""
    if loaders[0].layout.packed:
        batches = global_batches(loaders, steps)
        return [{name: tensor.tolist() for name, tensor in batch.items()} for batch in batches]
    return [conversations(own) for own in micro_batches(loaders, steps)]


def longest(batch: dict[str, torch.Tensor]) -> list[int]:
    """Tokens of each conversation of a batch."""
    return [len(d[0]) for d in documents(batch) if any(label != IGNORE for label in d[1])]


def expected_documents(rows: list[dict], seq_len: int = L) -> Counter:
    """(tokens, labels, positions) in Llama 3's format, written out by hand for a bytes tokenizer."""
    found: Counter = Counter()
    for row in rows:
        ids, trained = [256], [False]
        for message in to_conversation(row, "auto").messages:
            header = f"<|start_header_id|>{message['role']}<|end_header_id|>\n\n".encode()
            said = (message["content"].strip() + "<|eot_id|>").encode()
            ids += [*header, *said]
            trained += [False] * len(header) + [message["role"] == "assistant"] * len(said)
        ids, trained = [*ids, 257][:seq_len], [*trained, True][:seq_len]
        following = zip(ids[1:], trained[1:], strict=True)
        labels = [token if learned else IGNORE for token, learned in following] + [IGNORE]
        found[tuple(ids), tuple(labels), tuple(range(len(ids)))] += 1
    return found


def rows_of(folder) -> list[dict]:
    lines = (folder / "a.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines] + pq.read_table(folder / "b.parquet").to_pylist()


class TestRows:
    @pytest.mark.parametrize("packing", [True, False])
    def test_an_epoch_holds_every_conversation_once_as_written_out_by_hand(self, folder, data, packing):
        loader = build(replace(data, packing=packing), global_batch_size=2)
        batches = [batch for own in micro_batches([loader], loader.steps_for(1)) for batch in own]
        # The last global batch is filled from the second epoch.
        rest = conversations(batches) - expected_documents(rows_of(folder))
        assert not expected_documents(rows_of(folder)) - conversations(batches)
        assert sum(rest.values()) < 40 if packing else sum(rest.values()) <= 1

    def test_truncated(self, folder, data):
        loader = build(data, seq_len=200, global_batch_size=2)
        found = conversations(global_batches([loader], loader.steps_for(1)))
        kept = Counter(
            {d: n for d, n in expected_documents(rows_of(folder), 200).items() if any(x != IGNORE for x in d[1])}
        )
        assert not kept - found

    def test_packed_rows_have_one_length(self, data):
        assert {batch["input"].shape for batch in global_batches([build(data)], 4)} == {(G, L)}

    @pytest.mark.parametrize(("ranks", "micro"), [(1, 1), (1, 2), (2, 2), (4, 1), (1, 8)])
    def test_a_micro_batch_has_the_length_of_its_longest_row_among_rows_like_it(self, data, ranks, micro):
        loaders = [build(replace(data, packing=False), rank, ranks, micro) for rank in range(ranks)]
        epoch = 80 // G
        padding = [0] * ranks
        for own in micro_batches(loaders, epoch):
            lengths = [batch["input"].shape[1] for batch in own]
            in_order = sorted((length for batch in own for length in longest(batch)), reverse=True)
            expected = [-(-length // 8) * 8 for length in in_order[::micro]]
            assert sorted((batch["input"].shape[1] for batch in own), reverse=True) == expected
            assert all(batch["input"].shape == (micro, -(-max(longest(batch)) // 8) * 8) for batch in own)
            per_rank = len(own) // ranks
            for rank in range(ranks):
                of_rank = lengths[rank * per_rank : (rank + 1) * per_rank]
                assert of_rank == sorted(of_rank, reverse=True)
            for turn in range(per_rank):  # the ranks' batches of a turn are next to each other in length
                assert sorted(lengths[turn::per_rank], reverse=True) == expected[turn * ranks : (turn + 1) * ranks]
            for rank, batch in ((i // per_rank, batch) for i, batch in enumerate(own)):
                padding[rank] += batch["input"].numel() - sum(longest(batch))
        tokens = int(loaders[0].conversations.lengths.sum())
        assert loaders[0].padding() == pytest.approx(sum(padding) / (sum(padding) + tokens))

    def test_ranks_take_turns_at_the_longest(self, data):
        loaders = [build(replace(data, packing=False), rank, 2, 1) for rank in range(2)]
        for own in micro_batches(loaders, 3):
            one, other = own[:4], own[4:]
            for turn, (a, b) in enumerate(zip(one, other, strict=True)):
                ahead = max(longest(a)) - max(longest(b))
                assert ahead >= 0 if turn % 2 == 0 else ahead <= 0

    def test_padding_is_a_document_of_its_own_without_labels(self, data):
        loader = build(replace(data, packing=False), micro=8)
        ((batch,),) = micro_batches([loader], 1)
        padding = [d for d in documents(batch) if set(d[0]) == {257}]
        assert len(padding) >= G - 1
        assert loader.packed.padding == sum(len(d[0]) for d in padding) > 0
        for _, labels, positions in padding:
            assert set(labels) == {IGNORE}
            assert positions == tuple(range(len(positions)))

    def test_without_document_masks_positions_go_on(self, data):
        masked, unmasked = (global_batches([build(replace(data, mask_documents=m))], 1)[0] for m in (True, False))
        assert torch.equal(masked["input"], unmasked["input"])
        assert torch.equal(masked["labels"], unmasked["labels"])
        for row in range(G):
            used = int((masked["input"][row] == 257).nonzero()[-1]) + 1
            used = used if masked["labels"][row, used - 2] == 257 else int(masked["document_starts"][row, -1])
            assert unmasked["positions"][row, :used].tolist() == list(range(used))
            assert not unmasked["document_starts"][row, :used].any()

    def test_best_fit_is_tight(self):
        rows = best_fit(np.array([5, 5, 4, 3, 3, 2, 8]), 10)
        assert rows == [[6, 5], [0, 1], [2, 3, 4]]

    @settings(deadline=None, max_examples=50)
    @given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=60))
    def test_best_fit_holds_everything_once(self, lengths):
        rows = best_fit(np.array(lengths), 50)
        assert sorted(item for row in rows for item in row) == list(range(len(lengths)))
        assert all(sum(lengths[item] for item in row) <= 50 for row in rows)
        assert len(rows) <= 11 / 9 * -(-sum(lengths) // 50) + max(1, sum(length > 25 for length in lengths))

    def test_little_of_typical_rows_is_padding(self):
        lengths = np.random.default_rng(0).lognormal(5.3, 0.7, 4000).clip(20, 1024).astype(int)
        assert len(best_fit(lengths, 1024)) * 1024 < 1.02 * lengths.sum()


class TestOrder:
    @pytest.mark.parametrize("packing", [True, False])
    def test_does_not_depend_on_ranks_or_micro_batches(self, data, packing):
        data = replace(data, packing=packing)
        whole = steps_of([build(data, micro=8)], 6)
        for ranks, micro in ((2, 2), (4, 1)):
            assert steps_of([build(data, rank, ranks, micro) for rank in range(ranks)], 6) == whole

    def test_depends_on_the_seed_and_changes_every_epoch(self, data):
        loader = build(replace(data, packing=False), global_batch_size=80, micro=80)
        first, second = global_batches([loader], 2)
        assert conversations([first]) == conversations([second])
        assert not torch.equal(first["input"], second["input"])
        other = build(replace(data, packing=False, seed=4), global_batch_size=80, micro=80)
        assert not torch.equal(first["input"], global_batches([other], 1)[0]["input"])

    def test_never_changes(self):
        """A run that resumes with a later version must find the same order."""
        assert permutation(10, 7).tolist() == [8, 4, 3, 2, 0, 5, 7, 9, 1, 6]

    @pytest.mark.slow
    @pytest.mark.parametrize("resumed_on", [1, 2, 4])
    @pytest.mark.parametrize("packing", [True, False])
    def test_resumed_equals_undisturbed(self, data, packing, resumed_on):
        data = replace(data, packing=packing)
        undisturbed = steps_of([build(data)], 15)
        before = [build(data, rank, 2) for rank in range(2)]
        micro_batches(before, 7)  # in the middle of an epoch
        for loader in before:  # a step in progress counts as not begun
            next(iter(loader))
            assert loader.state_dict()["steps"] == 7
        state = json.loads(json.dumps(before[0].state_dict()))
        after = [build(data, rank, resumed_on, 1) for rank in range(resumed_on)]
        for loader in after:
            loader.load_state_dict(state)
        assert steps_of(after, 8) == undisturbed[7:]

    def test_a_new_iteration_goes_on_and_rewind_starts_again(self, data):
        loader = build(data)
        first = global_batches([loader], 2)
        second = global_batches([loader], 2)
        assert not torch.equal(first[0]["input"], second[0]["input"])
        assert loader.epochs == pytest.approx(4 * G / len(loader.sequence.plan(0)))
        loader.rewind()
        assert torch.equal(first[0]["input"], global_batches([loader], 1)[0]["input"])
        loader.close()

    def test_another_order_is_refused_with_both_values(self, folder, data, tmp_path):
        loader = build(data)
        dcp.save({"dataloader": loader.state_dict()}, checkpoint_id=tmp_path / "step-1", no_dist=True)
        build(data).check_order(saved_order(tmp_path / "step-1"))
        with pytest.raises(DataError, match=r"data\.seed was 3, is 4"):
            build(replace(data, seed=4)).check_order(saved_order(tmp_path / "step-1"))
        changed = [alpaca(i) for i in range(60)]
        changed[5]["output"] += "?"
        path = write(tmp_path / "a.jsonl", changed)
        other = replace(data, sources=(replace(data.sources[0], path=path), data.sources[1]))
        with pytest.raises(DataError, match="tokens \\(fingerprint\\) was"):
            build(other).load_state_dict(loader.state_dict())

    def test_steps_for(self, data):
        loader = build(data)
        rows = len(loader.sequence.plan(0))
        assert loader.steps_for(1) == -(-rows // G)
        assert loader.steps_for(2.5) == -(-int(2.5 * rows + 0.5) // G)
        assert loader.steps_for(0.001) == 1

    def test_sizes_that_do_not_divide_are_refused(self, data):
        with pytest.raises(DataError, match="a global batch of 8 rows can't be cut"):
            build(data, 0, 3)


class TestMixture:
    def test_weights_count_passes(self):
        """Weight 2 takes each conversation twice per epoch; 0.25 takes the next quarter of them."""
        plans = [
            plan_epoch(np.ones(30, int), [10, 8, 12], [2.0, 0.25, 1.0], seed=1, epoch=e, packed_length=None)
            for e in range(8)
        ]
        for plan in plans:
            count = Counter(plan.items.tolist())
            assert [count[i] for i in range(10)] == [2] * 10
            assert sum(count[i] for i in range(10, 18)) == 2
            assert [count[i] for i in range(18, 30)] == [1] * 12
        for four in (plans[:4], plans[4:]):
            count = Counter(i for plan in four for i in plan.items.tolist())
            assert [count[i] for i in range(10, 18)] == [1] * 8
        assert len({tuple(plan.items) for plan in plans}) == 8

    def test_a_weight_that_does_not_come_out_even(self):
        plans = [plan_epoch(np.ones(7, int), [7], [0.3], seed=1, epoch=e, packed_length=None) for e in range(10)]
        assert sum(len(plan) for plan in plans) == 21
        assert Counter(i for plan in plans for i in plan.items.tolist()) == Counter(list(range(7)) * 3)

    def test_rows_takes_so_many_and_others_with_another_seed(self, data):
        def taken(seed: int) -> list[str]:
            source = replace(data.sources[0], rows=25)
            return build(replace(data, sources=(source,), seed=seed)).conversations.keys

        assert len(taken(0)) == len(set(taken(0))) == 25
        assert taken(0) == taken(0) != taken(1)
        with pytest.raises(DataError, match=r"rows = 61, and the source has 60"):
            build(replace(data, sources=(replace(data.sources[0], rows=61),)))

    def test_a_dataset_gives_the_same_as_its_file(self, folder, data):
        hub = InstructionHub(name="json", data_files=str(folder / "a.jsonl"))
        one, other = (build(replace(data, sources=(source,))).conversations for source in (hub, data.sources[0]))
        assert one.fingerprint == other.fingerprint

    def test_weights_and_shares_that_make_no_sense(self, data):
        with pytest.raises(DataError, match="weight = 0"):
            build(replace(data, sources=(replace(data.sources[0], weight=0.0),)))
        with pytest.raises(DataError, match=r"data\.held_out = 1"):
            build(replace(data, held_out=1.0))
        with pytest.raises(DataError, match=r"data\.sources is empty"):
            build(replace(data, sources=()))


class TestBadRows:
    def test_stops_with_file_line_and_remedy(self, tmp_path, data):
        path = write(tmp_path / "bad.jsonl", [alpaca(0), {"instruction": "x"}])
        with pytest.raises(DataError, match=r"bad\.jsonl:2: no known format: .* set data\.on_bad_row"):
            build(replace(data, sources=(InstructionJsonl(path=path),)))

    def test_or_skips_and_counts(self, tmp_path, data, caplog):
        rows = [alpaca(0), {"instruction": "x"}, alpaca(1), {"messages": []}, alpaca(2) | {"output": "a <|eos|>"}]
        path = write(tmp_path / "bad.jsonl", rows)
        with open(path, "a") as file:
            file.write("{oops\n\n")
        loader = build(replace(data, sources=(InstructionJsonl(path=path),), on_bad_row="skip"))
        reasons = {"no known format": 1, "no messages": 1, "special token in the text": 1, "bad JSON": 1}
        assert loader.skipped == {f"data.sources[0], jsonl '{path}'": reasons}
        assert len(loader.conversations.keys) == 2
        assert "bad.jsonl:2: no known format" in caplog.text

    @pytest.mark.parametrize("seq_len", [L, 60])
    def test_without_a_trained_token_the_first_is_shown(self, tmp_path, data, seq_len):
        row = {"messages": [{"role": "user", "content": "My question"}, {"role": "assistant", "content": "A"}]}
        if seq_len == L:
            row["messages"][1]["train"] = False
        with pytest.raises(DataError, match=r"none\.jsonl:1: no trained token: none.*\n.*\n\nMy question<\|eot_id\|>"):
            build(one_row(tmp_path, "none.jsonl", row), seq_len=seq_len)

    def test_overlong(self, folder, data, caplog):
        caplog.set_level(logging.INFO)
        over = sum(len(d[0]) > 200 for d in expected_documents(rows_of(folder)))
        assert over > 3
        skip = replace(data, on_bad_row="skip")
        report = build(replace(skip, overlong="drop"), seq_len=200).reports
        assert sum(r.dropped for r in report) == over
        loader = build(skip, seq_len=200)
        untrained = sum(r.skipped["no trained token"] for r in loader.reports)
        assert sum(r.truncated for r in loader.reports) == over - untrained
        assert f"{loader.reports[0].truncated} truncated" in caplog.text
        with pytest.raises(DataError, match=r"b\.parquet row 0: \d+ tokens, and training\.seq_len = 200"):
            build(replace(data, overlong="error"), seq_len=200)

    def test_an_id_that_the_model_lacks(self, data):
        config = job(data)
        config.architecture = Architecture(vocab_size=200)
        with pytest.raises(DataError, match="token id 256 is outside the model's vocabulary of 200"):
            build_instruction_loader(config, BYTES, 0, 1)


class TestJsonArrays:
    """A file of instructions may be one JSON array instead of JSON lines."""

    @pytest.mark.parametrize("indent", [None, 2])
    def test_the_rows_are_those_of_its_lines(self, folder, tmp_path, data, indent):
        rows = [alpaca(i) | {"input": '], "é\u2028 \\"' * (i % 3)} for i in range(20)]
        lines = write(tmp_path / "rows.jsonl", rows)
        path = tmp_path / "rows.json"
        # Both with and without escapes, after a byte-order mark.
        path.write_text(
            "\ufeff \n" + json.dumps(rows, indent=indent, ensure_ascii=indent is None) + "\n", encoding="utf-8"
        )
        of_array, of_lines = (
            build(replace(data, sources=(InstructionJsonl(path=str(where)),))).conversations for where in (path, lines)
        )
        assert of_array.fingerprint == of_lines.fingerprint
        assert of_array.keys == [f"{path}[{i}]" for i in range(20)]
        both = build(replace(data, sources=(InstructionJsonl(path=f"{tmp_path}/rows.json*"),))).conversations
        assert both.sizes == (40,)

    def test_bad_elements_are_named_by_their_numbers(self, tmp_path, data):
        path = tmp_path / "rows.json"
        path.write_text(json.dumps([alpaca(0), 5, alpaca(1), {"instruction": "x"}]))
        data = replace(data, sources=(InstructionJsonl(path=str(path)),))
        with pytest.raises(
            DataError, match=r"rows\.json\[1\]: not an object: .* found int\. To go on, write each row as"
        ):
            build(data)
        skipped = build(replace(data, on_bad_row="skip"))
        assert skipped.conversations.keys == [f"{path}[0]", f"{path}[2]"]
        assert [*skipped.skipped.values()] == [{"not an object": 1, "no known format": 1}]

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ('[{"text": "a"}, {"text": "b', r"can't be read after 1 elements: Unterminated string .*Repair the file"),
            ('[{"text": "a"} {"text": "b"}]', r"can't be read after 1 elements: Expecting ',' or '\]'"),
            ('[{"text": "a"}', r"can't be read after 1 elements: Expecting ',' or '\]'"),
            ('[{"text": "a"},]', r"can't be read after 1 elements: Expecting value"),
            ('[{"text": "a"}]\n{"text": "b"}', r":1: not an object: a JSON object was expected, found list"),
            ("[]", "no conversation is in the train split"),
        ],
    )
    def test_what_is_no_array_is_refused(self, tmp_path, data, text, said):
        path = tmp_path / "rows.json"
        path.write_text(text)
        with pytest.raises(DataError, match=said):
            build(replace(data, sources=(InstructionJsonl(path=str(path)),)))


class TestHeldOut:
    def test_split_is_whole_disjoint_and_the_same_for_copies_in_another_format(self, folder, tmp_path, data):
        data = replace(data, held_out=0.2)
        config = job(data)
        train = build_instruction_loader(config, BYTES, 0, 1).conversations.keys
        held = build_instruction_validation_loader(config, BYTES, 0, 1).conversations.keys
        assert len(train) + len(held) == 80
        assert 5 < len(held) < 30
        assert not set(train) & set(held)
        messages = [{"messages": list(to_conversation(alpaca(i), "auto").messages)} for i in range(60)]
        copy = replace(data, sources=(InstructionJsonl(path=write(tmp_path / "a.jsonl", messages)),))
        copied = build_instruction_loader(job(copy), BYTES, 0, 1).conversations.keys
        assert [key.rsplit(":")[-1] for key in copied] == [key.rsplit(":")[-1] for key in train if ".jsonl" in key]

    @pytest.mark.slow
    @pytest.mark.parametrize("packing", [True, False])
    @pytest.mark.parametrize("steps", [-1, 1])
    def test_the_same_rows_on_any_number_of_ranks(self, data, packing, steps):
        config = job(replace(data, held_out=0.5, packing=packing), global_batch_size=4)
        config.validation.steps = steps

        def held(ranks: int) -> Counter:
            loaders = [build_instruction_validation_loader(config, BYTES, rank, ranks) for rank in range(ranks)]
            assert len({len(loader) for loader in loaders}) == 1
            batches = [inputs | {"labels": labels} for loader in loaders for inputs, labels in loader]
            return conversations(batches)

        assert held(1) == held(2) == held(4)
        alone = build_instruction_validation_loader(config, BYTES, 0, 1)
        if not packing:  # to the longest row of each micro-batch
            shapes = [inputs["input"].shape[1] for inputs, _ in alone]
            assert shapes == [-(-max(longest(inputs | {"labels": labels})) // 8) * 8 for inputs, labels in alone]
            assert steps == 1 or len({*shapes}) > 3
        count = len(alone.conversations.keys)
        assert sum(held(1).values()) == (count if steps == -1 else 4 if not packing else sum(held(1).values()))

    def test_nothing_held_out_is_an_error(self, tmp_path):
        data = replace(one_row(tmp_path, "one.jsonl", alpaca(1)), held_out=0.0001)
        with pytest.raises(DataError, match=r"no conversation is in the validation split; raise data\.held_out"):
            build_instruction_validation_loader(job(data), BYTES, 0, 1)


class TestInspect:
    def test_shows_what_is_trained(self, tmp_path):
        row = {"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "Aé"}]}
        loader = build(one_row(tmp_path, "a.jsonl", row), micro=1, global_batch_size=1, seq_len=128)
        shown = inspect_rows(loader, BYTES, 1, colour=False)
        assert "row 0: 1 conversations, 128 tokens, 14 of them trained, 0 padding" not in shown
        assert "<|bos|><|start_header_id|>user<|end_header_id|>\n\nQ<|eot_id|>" in shown
        assert "assistant<|end_header_id|>\n\n⟦Aé<|eot_id|><|eos|>⟧" in shown
        assert f"{tmp_path}/a.jsonl:1" in shown
        assert re.search(r"together: 1 conversations, \d+ tokens, .* 1 steps", shown)
        coloured = inspect_rows(loader, BYTES, 1, colour=True)
        assert "\x1b[32mAé<|eot_id|><|eos|>\x1b[0m" in coloured


def test_text_rows_are_trained_whole(tmp_path):
    loader = build(one_row(tmp_path, "text.jsonl", {"text": "once upon a time"}), micro=1, global_batch_size=1)
    (document,) = conversations(global_batches([loader], 1))
    ids = [256, *b"once upon a time", 257]
    assert document == (tuple(ids), (*ids[1:], IGNORE), tuple(range(len(ids))))


def test_the_template_in_use_is_at_hand(data):
    assert build(data).template.source == chat_template(data, BYTES).source
