"""How tools end: one sentence and status 2 for bad input, a traceback file and status 1 for our own faults."""

import argparse
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from farsight.cli import bounded, command, new_parser
from farsight.errors import UserError
from farsight.files import check_new_folder, inside
from farsight.new_folder import WRITING, new_folder
from farsight.ranges import Range

ROOT = Path(__file__).parents[2]


def ended(main, capsys):
    with pytest.raises(SystemExit) as stop:
        command(main)()
    return stop.value.code, capsys.readouterr().err


def raising(error):
    def main():
        raise error

    return main


def test_input_that_cannot_be_used_ends_with_its_sentence_and_status_2(capsys):
    assert ended(raising(UserError("--x = 3 is odd; set an even one.")), capsys) == (
        2,
        "--x = 3 is odd; set an even one.\n",
    )
    assert ended(Path("no/such").read_text, capsys) == (2, "no/such: No such file or directory.\n")


def test_a_fault_ends_with_one_line_and_leaves_its_traceback_in_a_file(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, said = ended(raising(KeyError("spam")), capsys)
    (file,) = tmp_path.iterdir()
    assert status == 1
    assert said.count("\n") == 1
    assert "KeyError: 'spam'" in said
    assert file.name in said
    assert "Traceback" not in said
    assert "in raising" not in said
    assert "raise error" in file.read_text()


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_fault_in_a_folder_that_cannot_be_written_shows_its_traceback(capsys, tmp_path, monkeypatch):
    tmp_path.chmod(0o500)
    monkeypatch.chdir(tmp_path)
    assert "Traceback" in ended(raising(KeyError("spam")), capsys)[1]


def test_a_value_error_of_a_library_is_a_fault_and_not_a_sentence(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, said = ended(lambda: np.zeros(3).reshape(2, 2), capsys)
    assert (status, "unexpected ValueError" in said) == (1, True)


@pytest.mark.parametrize(
    ("span", "good", "bad", "words"),
    [
        (Range(), [0.0, -1e300], [math.nan, math.inf, -math.inf], "finite"),
        (Range(above=0), [1e-300], [0.0, -1.0, math.nan, math.inf], "more than 0"),
        (Range(least=0, most=1), [0, 1, 0.5], [-1e-9, 1 + 1e-9, math.nan], "at least 0 and at most 1"),
        (Range(least=1), [1, 2**62], [0, -4], "at least 1"),
        (Range(least=0, below=1), [0, 0.999], [1.0], "at least 0 and less than 1"),
    ],
)
def test_ranges(span, good, bad, words):
    assert str(span) == words
    assert not any(span.problem(value) for value in good)
    assert all(span.problem(value) for value in bad)


def test_numbers_on_the_command_line(capsys):
    parser = argparse.ArgumentParser()
    parser.add_argument("--n", type=bounded(int, least=1))
    assert parser.parse_args(["--n", "2e3"]).n == 2000
    for text, words in {
        "0": "at least 1",
        "x": "not a whole number",
        "nan": "not a whole",
        "1e400": "not a whole",
        "2.5": "not a whole",
    }.items():
        with pytest.raises(SystemExit):
            parser.parse_args(["--n", text])
        assert words in capsys.readouterr().err


def test_whole_numbers_keep_their_digits():
    assert bounded(int, least=0)("9007199254740993") == 2**53 + 1
    assert str(Range(least=1, most=2**20)) == "at least 1 and at most 1,048,576"


def test_a_reader_that_is_gone_is_no_fault(tmp_path):
    code = "from farsight.cli import command\n@command\ndef main():\n    print('x' * 200000)\nmain()"
    shell = f'{sys.executable} -c "$CODE" | true; exit ${{PIPESTATUS[0]}}'
    done = subprocess.run(
        ["bash", "-c", shell], env={**os.environ, "CODE": code}, cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize("name", ["/etc/passwd", "../x", "a/../../x", "", "a\0b", "..\\x", 3, None])
def test_names_from_outside_stay_in_their_folder(tmp_path, name):
    with pytest.raises(UserError, match="names"):
        inside(tmp_path, name, "index.json")
    assert inside(tmp_path, "a/b.safetensors", "index.json") == tmp_path / "a" / "b.safetensors"


def test_only_a_folder_of_ours_is_replaced(tmp_path):
    out = tmp_path / "out"

    def write():
        with new_folder(out, lambda folder: (folder / "mark").is_file()) as part:
            (part / "mark").touch()
            (part / "new").touch()

    out.mkdir()
    (out / "theirs").touch()
    with pytest.raises(UserError, match="did not write"):
        write()
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "theirs"]
    (out / "theirs").rename(out / "mark")
    (out / "old").touch()
    write()
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["mark", "new", "out"]
    with pytest.raises(UserError, match="not empty"):
        check_new_folder(out)
    out.rename(tmp_path / "elsewhere")
    out.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="in the way"):
        write()


def test_a_writer_that_was_killed_between_its_renames_loses_nothing(tmp_path):
    out, part = tmp_path / "out", tmp_path / "out.part"
    for folder in (part, part / ".farsight-replaced"):
        folder.mkdir()
        (folder / "mark").write_text(folder.name)
    (part / ".farsight-writing").touch()
    with pytest.raises(ZeroDivisionError), new_folder(out, lambda folder: (folder / "mark").is_file()):
        _ = 1 / 0
    assert (out / "mark").read_text() == ".farsight-replaced"
    assert not part.exists()


def test_a_folder_is_resumed_only_by_a_writer_of_the_same(tmp_path):
    def write(name, what):
        with new_folder(tmp_path / "out", lambda folder: False, resumed=what) as part:
            (part / name).touch()
            raise ZeroDivisionError

    for name, what, left in (("1", "one", {"1"}), ("2", "one", {"1", "2"}), ("3", "other", {"3"})):
        with pytest.raises(ZeroDivisionError):
            write(name, what)
        assert {path.name for path in (tmp_path / "out.part").iterdir()} - {WRITING} == left
    with new_folder(tmp_path / "out", lambda folder: False):
        pass
    assert list(tmp_path.rglob("*")) == [tmp_path / "out"]


def test_of_two_writers_the_second_is_refused(tmp_path):
    with new_folder(tmp_path / "out", lambda folder: False) as part:
        (part / "first").touch()
        with pytest.raises(UserError, match="is being written"), new_folder(tmp_path / "out", lambda folder: False):
            raise AssertionError("two at once")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["first"]


def test_an_unknown_option_is_refused_with_the_nearest_that_there_is(capsys):
    parser = new_parser("tool", None)
    parser.add_argument("--new-tokens")
    parser.add_argument("--chunk")
    commands = new_parser("tool", None)
    commands.add_subparsers().add_parser("train").add_argument("--vocab-size")
    for refusing, arguments, ending in [
        (parser, ["--max-new-tokens", "3"], "unrecognized arguments: --max-new-tokens 3 (did you mean --new-tokens?)"),
        (parser, ["--max-new-tokens=3", "--chnk", "8"], "--chnk 8 (did you mean --new-tokens and --chunk?)"),
        (commands, ["train", "--vocabsize", "9"], "--vocabsize 9 (did you mean --vocab-size?)"),
        (parser, ["--batch", "3"], "unrecognized arguments: --batch 3"),
        (parser, ["more"], "unrecognized arguments: more"),
    ]:
        with pytest.raises(SystemExit):
            refusing.parse_args(arguments)
        assert capsys.readouterr().err.endswith(f"{ending}\n")


def test_tools_say_nothing_about_parts_of_libraries_that_they_do_not_use():
    program = """
from farsight.cli import command

@command
def main():
    import logging
    import bitsandbytes, torchao.quantization
    logging.getLogger("torchao").warning("something else")

main()
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stderr == "something else\n"
