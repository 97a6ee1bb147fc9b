"""Opening the data of recipes and configs in a dry run, on local imitations of the published corpora."""

import json
import logging

import datasets  # noqa: F401  sets the levels of its loggers when it is imported
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import farsight.launch.open_data as open_data_module
from farsight import train
from farsight.configs.load import build_config, read_toml
from farsight.configs.schema import JsonlSource
from farsight.configs.shipped import shipped_configs
from farsight.data.prepare.write import Job, prepare
from farsight.data.sources.documents import split_of
from farsight.data.tokenizers.tokenizer import BytesTokenizer
from farsight.launch.open_data import open_data
from farsight.launch.recipe.__main__ import main
from farsight.progress import progress
from tests.published import texts, write, write_published

RECIPES = [name for name, path in shipped_configs().items() if "stages" in read_toml(path)]


@pytest.fixture(scope="module", autouse=True)
def workplace(tmp_path_factory):
    """A working directory with imitations of the recipes' data, and tokenizers with a token for each byte."""
    root = tmp_path_factory.mktemp("workplace")
    write_published(root)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    for name in ("llama2", "llama3", "llama3-instruct"):
        (root / "assets" / name).mkdir(parents=True)
        tokenizer.save(str(root / "assets" / name / "tokenizer.json"))
    for kind, length in (("needles", 126), ("needles", 254), ("needles", 510), ("questions", 510)):
        write(root / f"runs/passkey/{kind}_{length + 2}.jsonl", [{"text": f"{i:0{length}}"} for i in range(40)])
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        yield root


def ran(capsys, *arguments):
    """Status of `farsight recipe … --dry-run --open-data`, the table's lines, and what it refused.

    More documents are held out: there are few.
    """
    try:
        status = main([*arguments, "--dry-run", "--open-data", "--data.held_out", "0.2"])
    except SystemExit as stop:
        status = stop.code
    printed, refused = capsys.readouterr()
    _, _, table = printed.partition("\nsource ")
    return status, table.splitlines()[1:], refused


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_data_of_every_recipe_opens(capsys, recipe):
    own = ["--tokenizer.kind", "bytes", "--tokenizer.path", ""] if "passkey" in recipe else []
    status, table, refused = ran(capsys, recipe, "--recipe.start", "", *own)
    assert status == 0, refused
    assert table
    last = "opens; no tokenizer to check lengths with" if "inside" in recipe or recipe == "quickstart" else "opens"
    assert {line.split("  ")[-1] for line in table} == {last}


def test_documents_are_counted_as_training_would_take_them(capsys):
    """Two files of 40 documents, of which five are longer than the filter: counted from the imitation."""
    _, table, _ = ran(capsys, "lasp_llama3_8b", "--recipe.start", "")
    (line,) = table
    documents, held_out, passing, mean, _ = line.split()[2:]
    assert line.startswith("cerebras/SlimPajama-627B  extend-96k")
    assert (documents, passing) == ("80", "10")
    long = len("cerebras/SlimPajama-627B/train/chunk1/example_train_0.jsonl.zst row 16: ") + 7000 * len(
        "words and more words "
    )
    assert abs(int(mean.replace(",", "")) - long) < 2
    names = [f"cerebras/SlimPajama-627B/train/chunk{chunk}/example_train_0.jsonl.zst" for chunk in (1, 2)]
    assert int(held_out) == sum(split_of(text.encode(), 0.2) == "validation" for name in names for text in texts(name))


def test_every_problem_is_said(capsys, workplace, monkeypatch):
    """Not only the first: a missing dataset, a wrong column, and sources of later stages; stages that share one are named together."""
    sources = [
        {"kind": "huggingface", "name": "json", "data_files": "nowhere/*.jsonl"},
        {"kind": "huggingface", "name": "cerebras/SlimPajama-627B", "field": "body"},
        {"kind": "huggingface", "name": "tiiuae/falcon-refinedweb", "field": "content"},
        {"kind": "jsonl", "path": "gone.jsonl"},
    ]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    inline = (
        "[" + ", ".join("{" + ", ".join(f"{k} = {json.dumps(v)}" for k, v in s.items()) + "}" for s in sources) + "]"
    )
    status, table, refused = ran(capsys, "nano_rope", "--data.sources", inline)
    assert status == 2
    assert [line.split("  ")[-1] for line in table] == ["fails", "fails", "opens", "fails"]
    problems = refused.partition("can't run yet:\n")[2].splitlines()
    assert len(problems) == 3
    assert all(problem.startswith("pretrain-1k: ") for problem in problems)
    assert "gone.jsonl': no such file" in problems[0]
    assert "it can't be opened" in problems[1]
    assert "no column 'body'. Set the source's `field` to one of those there: meta, text." in problems[2]
    assert main(["nano_rope", "--dry-run"]) == 0  # without the option, none of it is opened
    with pytest.raises(SystemExit, match="2"):
        main(["nano_rope", "--open-data"])


def checked(**data):
    config = build_config(
        {
            "data": {"held_out": 0.1} | data,
            "tokenizer": {"kind": "bytes"},
            "architecture": {"vocab_size": 0},
            "training": {"seq_len": 64},
        }
    )
    return open_data([("one", config), ("two", config)])


class TestFilters:
    def test_a_filter_that_nothing_passes(self, tmp_path):
        """A failure if the whole source was read, else a line in the table."""
        write(tmp_path / "few.jsonl", [{"text": f"short {i}"} for i in range(50)])
        source = {"kind": "jsonl", "path": f"{tmp_path}/few.jsonl", "min_tokens": 1000}
        table, problems = checked(sources=[source])
        assert "fails" in table
        (problem,) = problems
        assert problem.startswith("one, two: jsonl source")
        assert "no document of the train split passes min_tokens = 1000" in problem
        write(tmp_path / "many.jsonl", [{"text": f"short {i}"} for i in range(500)])
        table, problems = checked(sources=[source | {"path": f"{tmp_path}/many.jsonl"}])
        assert not problems
        assert table.splitlines()[-1].endswith("opens, but none of these passes")
        assert " 256 " in table.splitlines()[-1]

    def test_prepared_shards_are_counted_as_their_source(self, tmp_path):
        write(tmp_path / "a.jsonl", [{"text": "short" if i % 3 else "long" * (40 + i)} for i in range(60)])
        source = {"kind": "jsonl", "path": f"{tmp_path}/a.jsonl", "min_tokens": 100, "max_tokens": 300}
        raw, problems = checked(sources=[source])
        prepare(Job(JsonlSource(path=source["path"]), tmp_path / "shards"), BytesTokenizer(), processes=1)
        shards, same = checked(sources=[source | {"kind": "shards", "path": f"{tmp_path}/shards"}])
        raw, shards = (table.splitlines()[1].partition("  one, two ")[2].split() for table in (raw, shards))
        assert raw == shards
        assert (raw[0], raw[2]) == ("60", str(sum(4 * (40 + i) <= 300 for i in range(0, 60, 3))))
        assert problems == same == []

    def test_nothing_held_out(self, tmp_path):
        write(tmp_path / "a.jsonl", [{"text": "one document"}] * 3)
        sources = [{"kind": "jsonl", "path": f"{tmp_path}/a.jsonl"}]
        for large_or_small in ([{"kind": "stdlib"}], sources):
            (problem,) = checked(sources=large_or_small, held_out=0.0)[1]
            assert problem.startswith("one, two: data.held_out = 0 keeps no documents")
        assert "no document is in the validation split" in checked(sources=sources, held_out=1e-9)[1][0]

    def test_a_filter_that_contradicts_itself(self):
        assert "no length is both" in checked(sources=[{"kind": "stdlib", "min_tokens": 9, "max_tokens": 8}])[1][0]

    def test_bad_rows(self, tmp_path):
        write(tmp_path / "a.jsonl", [{"text": f"document {i}"} for i in range(99)] + [{"text": None}])
        sources = [{"kind": "jsonl", "path": f"{tmp_path}/a.jsonl"}]
        assert "a.jsonl:100: not a string" in checked(sources=sources)[1][0]
        table, problems = checked(sources=sources, on_bad_row="skip")
        assert (table.splitlines()[-1].endswith("opens; 1 bad rows"), problems) == (True, [])


def test_token_ids_and_vocabulary(tmp_path):
    write(tmp_path / "a.jsonl", [{"text": f"document {i}"} for i in range(40)])
    for size, words in ((128, "architecture.vocab_size = 128 is less than the tokenizer's 258"), (258, "")):
        config = build_config(
            {
                "data": {"sources": [{"kind": "jsonl", "path": f"{tmp_path}/a.jsonl"}], "held_out": 0.3},
                "tokenizer": {"kind": "bytes"},
                "architecture": {"vocab_size": size},
                "validation": {"enable": False},
            }
        )
        _, problems = open_data([("one", config)])
        assert [words in problem for problem in problems] == [True] * bool(words)


def test_a_fault_is_not_taken_for_bad_data(monkeypatch):
    monkeypatch.setattr(open_data_module, "split_of", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        checked(sources=[{"kind": "stdlib"}])


def test_the_retries_of_the_libraries_are_not_shown(tmp_path, caplog, monkeypatch):
    """Nor those of the library for JSON, but warnings of our own."""

    def fails(config, *_):
        logging.getLogger("huggingface_hub.utils._http").warning("Retrying in 8s")
        logging.getLogger("fsspec").error("disconnected")
        logging.getLogger("farsight.data").warning("a bad row")
        return opened(config, *_)

    (tmp_path / "a.jsonl").write_text("not json\n")
    opened = open_data_module.open_source
    monkeypatch.setattr(open_data_module, "open_source", fails)
    levels = [logging.getLogger(name).level for name in ("datasets", "huggingface_hub", "fsspec")]
    _, (problem,) = checked(sources=[{"kind": "huggingface", "name": "json", "data_files": f"{tmp_path}/a.jsonl"}])
    assert "JSON parse error" in problem
    assert [record.message for record in caplog.records] == ["a bad row"]
    assert [logging.getLogger(name).level for name in ("datasets", "huggingface_hub", "fsspec")] == levels


def test_progress_counts_the_documents_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a.jsonl", [{"text": f"document {i}"} for i in range(40)])
    bars = []
    monkeypatch.setattr(open_data_module, "progress", lambda **given: bars.append(progress(**given)) or bars[0])
    sources = [{"kind": "jsonl", "path": f"{name}.jsonl"} for name in ("gone", "a")]
    checked(sources=sources)
    assert (bars[0].n, bars[0].total) == (40, 40)
    assert bars[0].postfix == "jsonl a.jsonl"
    bars.clear()
    checked(sources=sources[:1])
    assert (bars[0].n, bars[0].total) == (0, 0)


def test_a_single_config(capsys, tmp_path, workplace):
    (tmp_path / "a.toml").write_text(
        '[tokenizer]\nkind = "bytes"\n[architecture]\nvocab_size = 0\n'
        '[data]\nsources = [{ kind = "huggingface", name = "HuggingFaceFW/fineweb-edu", config = "sample-10BT" }]\n'
    )
    given = ["--job.config_file", str(tmp_path / "a.toml"), "--open-data", "--data.held_out", "0.2"]
    assert train.main([*given]) == 0
    (line,) = capsys.readouterr().out.splitlines()[1:]
    assert line.startswith("HuggingFaceFW/fineweb-edu sample-10BT  run ")
    assert line.endswith("opens")
    assert train.main([*given, "--data.sources.0.field", "body"]) == 2
