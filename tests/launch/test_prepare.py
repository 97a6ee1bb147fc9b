"""`farsight prepare`: from a config or recipe to shards, and to what to write in its place."""

import json
import re
import tomllib

import pytest

from farsight.commands import main
from farsight.configs.load import build_config
from farsight.data.loader import Loader
from farsight.data.tokenizers.tokenizer import BytesTokenizer


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with data, a config and a recipe; the current one."""
    monkeypatch.chdir(tmp_path)
    for name in "ab":
        rows = [json.dumps({"text": f"{name} {i} " * (3 + i % 9)}) for i in range(40)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    one = '{ kind = "jsonl", path = "a.jsonl", weight = 2.0, min_tokens = 9 }'
    other = '{ kind = "jsonl", path = "b.jsonl" }'
    shared = '[model]\nflavor = "tiny"\n[tokenizer]\nkind = "bytes"\n'
    (tmp_path / "run.toml").write_text(f"{shared}[data]\nsources = [{one}, {other}]\n")
    long = one.replace("min_tokens = 9", 'max_tokens = 30, packing = "best_fit"')
    stages = "".join(
        f'[[stages]]\nname = "{name}"\n[stages.data]\nsources = [{sources}]\n'
        for name, sources in (("short", one), ("long", f"{other}, {long}"))
    )
    (tmp_path / "recipe.toml").write_text(shared + stages)
    return tmp_path


def test_what_it_prints_trains_on_the_same_batches(folder, capsys):
    assert main(["prepare", "run.toml", "--out", "out", "--processes", "1"]) == 0
    printed = capsys.readouterr().out
    values = tomllib.loads(printed[printed.index("[data]") :])
    assert values["data"]["sources"] == [
        {"kind": "shards", "path": "out/source-0", "weight": 2.0, "min_tokens": 9},
        {"kind": "shards", "path": "out/source-1"},
    ]
    shards, raw = (
        Loader(
            build_config(config).data, BytesTokenizer(), seq_len=32, vocab_size=258, global_batch_size=2,
            micro_batch_size=2, dp_rank=0, dp_world_size=1,
        )
        for config in (values, tomllib.loads((folder / "run.toml").read_text()))
    )  # fmt: skip
    for _, (found, expected) in zip(range(30), zip(shards, raw, strict=False), strict=False):
        assert found[0]["input"].equal(expected[0]["input"])
        assert found[1].equal(expected[1])


def test_a_recipe_prepares_each_source_once(folder, capsys):
    main(["prepare", "recipe.toml", "--out", "out", "--processes", "1"])
    printed = capsys.readouterr().out
    assert re.findall(r"source (\d) of 2: jsonl into (\S+)", printed) == [("1", "out/source-0"), ("2", "out/source-1")]
    assert printed[printed.index("# recipe short") :] == (
        "# recipe short\n[data]\nsources = [\n"
        '    { kind = "shards", path = "out/source-0", weight = 2.0, min_tokens = 9 },\n]\n'
        "# recipe long\n[data]\nsources = [\n"
        '    { kind = "shards", path = "out/source-1" },\n'
        '    { kind = "shards", path = "out/source-0", weight = 2.0, max_tokens = 30, packing = "best_fit" },\n]\n'
    )
    main(["prepare", "recipe.toml", "--out", "one", "--stage", "short", "--processes", "1"])
    assert [path.name for path in (folder / "one").iterdir()] == ["source-0"]


def test_looking_at_what_was_prepared(folder, capsys):
    main(["prepare", "run.toml", "--out", "out", "--processes", "1"])
    capsys.readouterr()
    assert main(["prepare", "out", "--inspect", "1", "--verify"]) == 0
    printed = capsys.readouterr().out
    assert "out/source-0: jsonl source a.jsonl" in printed
    assert "40 documents in 40 rows" in printed
    assert "a 0 a 0 a 0" in printed
    assert printed.endswith("out/source-1: all 2 files are intact\n")
    path = folder / "out" / "source-1" / "index.npy"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(SystemExit, match=r"source-1/index\.npy is damaged"):
        main(["prepare", "out", "--verify"])
    (folder / "out" / "source-0" / "manifest.json").unlink()
    for look in (["--verify"], ["--inspect", "0"]):
        with pytest.raises(SystemExit, match="out/source-0 is not finished: prepare it again to go on"):
            main(["prepare", "out", *look])
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main(["prepare", "out", "--verify", "--nonsense", "3"])
    assert "no other options" in capsys.readouterr().err


def test_every_source_is_opened_before_one_is_written(folder):
    (folder / "b.jsonl").unlink()
    with pytest.raises(SystemExit, match=r"b\.jsonl': no such file"):
        main(["prepare", "run.toml", "--out", "out", "--processes", "1"])
    assert not (folder / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["run.toml"], "--out DIR is missing"),
        (["run.toml", "--out", "x", "--stage", "y"], "is not a recipe: it has no stage 'y'"),
        (["finetune/ablation_a", "--out", "x"], "fine-tunes on conversations"),
        (["nowhere", "--verify"], "no manifest.json in it"),
        (["run.toml", "--out", "x", "--tokenizer.kind", "auto"], "tokenizer.path is empty"),
    ],
)
def test_refusals(folder, capsys, arguments, sentence):
    with pytest.raises(SystemExit):
        main(["prepare", *arguments])
    assert sentence in capsys.readouterr().err
