"""Needles: exact lengths under every tokenizer, at the right depth, and no second mention of the answer."""

import itertools
import json
import re

import pytest
from tokenizers import Tokenizer as Fast
from tokenizers import decoders, models, pre_tokenizers

from farsight.data.needles import main
from farsight.data.retrieval.documents import document
from farsight.data.retrieval.needles import (
    NAMES,
    SEGMENTS,
    Haystack,
    most,
    multi_passkey,
    named_passkeys,
    passkey,
    place,
    prompt,
)
from farsight.data.tokenizers.tokenizer import BytesTokenizer, load_tokenizer_dir, train_sentencepiece
from farsight.errors import DataError

TEXT = (
    "One thing happened; then another, at length. Was it so? " * 3
    + "It was!\nA line of its own\n\n終わりです。次の文です。"
    + "x" * 900
)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    sentences = Haystack(0).sentences(2000)
    trained = tmp_path_factory.mktemp("sentencepiece")
    train_sentencepiece([" ".join(sentences)], 512, trained)
    letters = pre_tokenizers.ByteLevel.alphabet()  # a byte-level BPE such as Llama 3's, with a few merges and no bos
    vocabulary = {letter: i for i, letter in enumerate(sorted(letters))}
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("e", "r"), ("i", "n")]
    vocabulary |= {left + right: 256 + i for i, (left, right) in enumerate(merges)}
    fast = Fast(models.BPE(vocabulary, merges))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    byte_level = tmp_path_factory.mktemp("byte_level")
    fast.save(str(byte_level / "tokenizer.json"))
    return {"bytes": BytesTokenizer(), **{d.name[:-1]: load_tokenizer_dir(d) for d in (trained, byte_level)}}


def tokens_of(tokenizer, sample):
    """Counts as generation does: bos, the prompt, then the answer tokenised separately."""
    answer = tokenizer.encode(" " + ", ".join(sample.answers) + ".")
    return (tokenizer.bos_id is not None) + len(tokenizer.encode(sample.prompt)) + len(answer)


def depth_of(sample, span, needles):
    """A needle's depth in the haystack's characters, without the other needles."""
    haystack = sample.prompt.split("\n\n")[1]
    start = sample.prompt.index("\n\n") + 2
    others = sum(stop - first + 1 for first, stop in needles)
    before = sum(stop - first + 1 for first, stop in needles if first < span[0])
    return (span[0] - start - before) / (len(haystack) - others)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bytes", "sentencepiece", "byte_level"])
@pytest.mark.parametrize("length", [300, 512, 1023, 4096])
def test_prompts_fill_their_length_and_no_more(tokenizers, kind, length):
    tokenizer = tokenizers[kind]
    makers = [
        lambda haystack, tokens: passkey(haystack, tokenizer, tokens, 0.3),
        lambda haystack, tokens: named_passkeys(haystack, tokenizer, tokens, [0.9, 0.0], ask=1),
        lambda haystack, tokens: multi_passkey(haystack, tokenizer, tokens + 300),
    ]
    # Not even one more sentence would fit.
    longest = max(len(tokenizer.encode(f" {sentence}")) for sentence in Haystack(0).sentences(200))
    for make, extra in zip(makers, (0, 0, 300), strict=True):
        made_up = [tokens_of(tokenizer, make(Haystack(seed), length)) - extra for seed in range(4)]
        assert max(made_up) <= length
        assert min(made_up) > length - longest
        # The shortest prompts have too few sentences to choose from.
        assert made_up.count(length) >= 2 or length == 300
        sample = make(Haystack(1, TEXT), length)
        # The longest sentence of this text has 400 characters.
        assert length - 401 <= tokens_of(tokenizer, sample) - extra <= length


def test_long_prompts_take_few_tokenizer_calls(tokenizers):
    class Counting(BytesTokenizer):
        calls = 0

        def encode(self, text):
            self.calls += len(text) > 10_000
            return super().encode(text)

    tokenizer = Counting()
    assert tokens_of(tokenizer, passkey(Haystack(5), tokenizer, 131_072, 0.5)) == 131_072
    assert tokenizer.calls < 20


@pytest.mark.parametrize(
    "size", [lambda n: 7 * n + 3, lambda n: 3 + n * n, lambda n: 3 + n // 3, lambda n: 3 + 5 * (n > 6) + n]
)
def test_most_is_the_largest_that_fits(size):
    for limit in range(3, 200):
        found = most(size, limit)
        assert size(found) <= limit < size(found + 1)
    with pytest.raises(DataError, match="2 tokens are too few: without any haystack the prompt and its answer take 3"):
        most(size, 2)


@pytest.mark.parametrize("text", [None, TEXT])
def test_needles_stand_where_asked_between_sentences(tokenizers, text):
    tokenizer = tokenizers["bytes"]
    for depth in (0, 0.1, 0.37, 0.5, 0.93, 1):
        haystack = Haystack(11, text)
        sample = passkey(haystack, tokenizer, 6000, depth)
        (span,) = sample.evidence
        assert sample.prompt[slice(*span)] == "The passkey is {0}. Remember {0}.".format(*sample.answers)
        # Half of the longest sentence to either side.
        assert depth_of(sample, span, [span]) == pytest.approx(depth, abs=(30 if text is None else 200) / 5000)
        before, _, after = sample.prompt.split("\n\n")[1].partition(sample.prompt[slice(*span)])
        assert not before or before.endswith(" ")
        assert not after or after.startswith(" ")
        if text is None:
            assert before.rstrip().endswith(".") or not before
            assert re.fullmatch(r"( [A-Z][^.]*\.)*", after)
    first, last = (passkey(Haystack(11), tokenizer, 2000, depth) for depth in (0, 1))
    assert first.prompt.split("\n\n")[1].startswith("The passkey")
    assert last.prompt.split("\n\n")[1].endswith(f"{last.answers[0]}.")


def test_place_equals_trying_every_boundary():
    sentences = [f"{'a' * n}." for n in (3, 14, 1, 59, 2, 6)]
    ends = list(itertools.accumulate((len(s) + 1 for s in sentences), initial=0))
    for depth in [i / 57 for i in range(58)]:
        text, ((first, stop),) = place(sentences, [(depth, "N.")])
        nearest = min(ends, key=lambda end: abs(end - depth * ends[-1]))
        assert (first, text[first:stop]) == (nearest, "N.")
        assert text.replace("N.", "").split() == sentences
    text, spans = place(sentences, [(1, "C."), (0, "A."), (0.2, "B."), (0.21, "b.")])
    assert [text[first:stop] for first, stop in spans] == ["C.", "A.", "B.", "b."]
    assert text == f"A. {sentences[0]} {sentences[1]} B. b. {' '.join(sentences[2:])} C."
    assert place([], [(0.5, "N.")]) == ("N.", ((0, 2),))


def test_named_and_multiple_passkeys(tokenizers):
    tokenizer = tokenizers["sentencepiece"]
    depths = [0.8, 0.1, 0.5]
    everything = named_passkeys(Haystack(3), tokenizer, 900, depths)
    assert len({*everything.answers}) == len(everything.evidence) == 3
    stated = [everything.prompt[slice(*span)] for span in everything.evidence]
    names = [re.fullmatch(r"The passkey of (\w+) is (\d{5})\. Remember \2\.", text)[1] for text in stated]
    assert {*names} <= {*NAMES}
    in_order_of_depth = [everything.answers[i] for i in (1, 2, 0)]
    assert [text[-6:-1] for text in stated] == in_order_of_depth
    asked = [names[i] for i in (2, 0, 1)]
    assert everything.prompt.endswith(
        f"Question: What are the passkeys of {asked[0]}, {asked[1]} and {asked[2]}? "
        f"Answer: The passkeys of {asked[0]}, {asked[1]} and {asked[2]} are"
    )
    one = named_passkeys(Haystack(3), tokenizer, 900, depths, ask=2)
    assert one.answers == everything.answers[2:]
    assert one.prompt.endswith(f"What is the passkey of {asked[2]}? Answer: The passkey of {asked[2]} is")

    for seed in range(20):
        sample = multi_passkey(Haystack(seed), tokenizer, 2000)
        assert len({*sample.answers}) == 4
        for segment, (span, answer) in enumerate(zip(sample.evidence, sample.answers, strict=True)):
            assert sample.prompt[slice(*span)] == f"The passkey of {SEGMENTS[segment]} is {answer}. Remember {answer}."
            at = depth_of(sample, span, sample.evidence)
            assert segment / 4 - 0.01 <= at <= (segment + 1) / 4 + 0.01


@pytest.mark.slow
@pytest.mark.parametrize("text", [None, TEXT + " 12345 is no passkey."])
def test_a_passkey_stands_in_its_needle_alone(tokenizers, text):
    for seed in range(10):
        for sample in (
            passkey(Haystack(seed, text), tokenizers["bytes"], 1500, seed / 9),
            multi_passkey(Haystack(seed, text), tokenizers["bytes"], 1500),
        ):
            for answer, span in zip(sample.answers, sample.evidence, strict=True):
                assert re.fullmatch(r"[1-9]\d{4}", answer)
                assert sample.prompt.count(answer) == sample.prompt.count(answer, *span) == 2
    # Every number but one occurs in the text, so that one is drawn.
    numbers = " ".join(str(number) for number in range(10_000, 100_000) if number != 31_337)
    assert passkey(Haystack(0, numbers), tokenizers["bytes"], 1000, 0.5).answers == ("31337",)


def test_seeds_decide_and_lengths_do_not_change_the_question(tokenizers):
    tokenizer = tokenizers["bytes"]
    assert passkey(Haystack(1), tokenizer, 900, 0.4) == passkey(Haystack(1), tokenizer, 900, 0.4)
    samples = [passkey(Haystack(seed), tokenizer, 900, 0.4) for seed in range(50)]
    assert len({sample.prompt for sample in samples}) == len({sample.answers for sample in samples}) == 50
    assert passkey(Haystack(1), tokenizer, 3000, 0.9).answers == samples[1].answers
    assert passkey(Haystack(2, TEXT), tokenizer, 900, 0.4) != passkey(Haystack(3, TEXT), tokenizer, 900, 0.4)
    # The same on every machine and in every version: only hashes decide.
    assert Haystack(0).sentence(0) == "The field and the hill joined a soft path beside the path."


def test_haystacks():
    sentences = Haystack(0).sentences(4000)
    assert len({*sentences}) > 3800
    words = {word for sentence in sentences for word in re.findall(r"\w+", sentence.lower())}
    assert not words & {*NAMES, "passkey", "passkeys", "part"}
    assert not any(re.search(r"\d", sentence) for sentence in sentences)
    own = Haystack(4, TEXT)
    found = own.sentences(24)
    # A user's text from some sentence on, repeated.
    parts = [*["One thing happened; then another, at length.", "Was it so?"] * 3, "It was!", "A line of its own",
             "終わりです。", "次の文です。", "x" * 400, "x" * 400, "x" * 100]  # fmt: skip
    at = next(i for i in range(len(parts)) if (parts[i:] + parts + parts)[:24] == found)
    assert 0 <= at < len(parts)


def test_refusals(tokenizers):
    tokenizer = tokenizers["bytes"]
    with pytest.raises(DataError, match=r"depth = 1\.2"):
        passkey(Haystack(0), tokenizer, 900, 1.2)
    with pytest.raises(DataError, match="50 tokens are too few"):
        passkey(Haystack(0), tokenizer, 50, 0.5)
    with pytest.raises(DataError, match="21 named passkeys"):
        named_passkeys(Haystack(0), tokenizer, 9000, [0.5] * 21)
    with pytest.raises(DataError, match="text is empty"):
        Haystack(0, " \n ")


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece"])
def test_documents_fill_a_row_and_answer_rightly(tokenizers, kind):
    tokenizer = tokenizers[kind]
    alone = named = 0
    blank = "\n\n"
    for seed in range(60):
        text = document(seed, tokenizer, 800)
        if text is None:
            continue
        assert len(tokenizer.encode(text)) + 2 == 800  # bos and eos
        stated = dict(re.findall(r"(?<!Answer: )The passkey(| of \w+) is (\d{5})\.", text))
        answers = re.findall(r"What is the passkey(| of \w+)\? Answer: The passkey\1 is (\d{5})\.", text)
        assert all(stated[name] == number for name, number in answers)
        for name, number in answers:  # stated before it is asked
            assert text.index(f"The passkey{name} is {number}") < text.index(f"passkey{name}?")
        named += any(name for name, _ in answers)
        if len(answers) == 1 and not answers[0][0]:  # the evaluation's own form
            beginning, _, question = text.split(blank)
            sample = passkey(Haystack(seed), tokenizer, 800, 0.5)
            assert (beginning, question) == (
                sample.prompt.split(blank)[0],
                f"{sample.prompt.split(blank)[2]} {answers[0][1]}.",
            )
            alone += 1
    assert alone > 2
    assert named > 10


def test_the_command_writes_what_its_seed_says(tmp_path, capsys):
    def write(name, *options):
        main(["--out", str(tmp_path / name), "--documents", "30", "--tokens", "700", *options])
        return (tmp_path / name).read_text(encoding="utf-8")

    first = write("a", "--seed", "3")
    assert "30 documents of 700 tokens" in capsys.readouterr().out
    assert first == write("b", "--seed", "3") != write("c")
    texts = [json.loads(line)["text"] for line in first.splitlines()]
    assert len({*texts}) == 30
    assert {len(text.encode()) for text in texts} == {698}
    same = [json.loads(line)["text"] for line in write("same", "--same", "4").splitlines()]
    assert len({*same}) == 30
    own = re.compile(r"Question.*?is \d{5}\.|The passkey.*?Remember \d{5}\.")
    haystacks = [own.sub("", text.split("\n\n")[1]) for text in same]
    assert len({s.strip() for haystack in haystacks for s in haystack.split(".") if s.strip()}) == 4
    with pytest.raises(SystemExit, match="30 tokens are too few"):
        main(["--out", str(tmp_path / "d"), "--documents", "1", "--tokens", "31"])


def test_prompt_lays_out_its_parts():
    sample = prompt("Read.", ["A b.", "C d."], [(0.5, "N.")], "Q? A:", "x", "y")
    assert sample.prompt == "Read.\n\nA b. N. C d.\n\nQ? A:"
    assert sample.answers == ("x", "y")
    assert [sample.prompt[slice(*span)] for span in sample.evidence] == ["N."]
