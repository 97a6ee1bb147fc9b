"""Answers LOFT's prompts, in the format of its `run_evaluation.py`: LOFT's own inference supports only Gemini.

    farsight loft MODEL_DIR --prompts PROMPTS.csv --out outputs/rag/nq/128k/test_predictions.jsonl
    farsight loft MODEL_DIR --prompts PROMPTS.csv --corpus data/retrieval/nq/128k/corpus.jsonl --out …

PROMPTS.csv is written by LOFT's `dump_prompts.py --output_format=csv`, for questions of one turn. The answer is the first list that
the model writes on a line ("Final Answer: ['Spain']"). In retrieval the list holds numbers of the corpus's documents, in the
corpus's order; --corpus gives their names.
"""

import ast
import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from farsight.cli import command, model_path, new_parser, positive
from farsight.errors import ConfigError
from farsight.files import write_text
from farsight.inference.model_options import add_model_options
from farsight.outputs import output_file
from farsight.progress import progress


def read_prompts(path: Path) -> dict[str, str]:
    """Prompts by question identifier.

    Raises:
        ConfigError: no such file, or not a file of `dump_prompts.py`.
    """
    if not path.is_file():
        raise ConfigError(f"--prompts {path}: there is no such file.")
    csv.field_size_limit(1 << 30)  # a prompt may have a million tokens
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"--prompts {path} is not a CSV file in UTF-8 ({error}).") from None
    if not rows or not {"prompt_id", "prompt"} <= rows[0].keys():
        raise ConfigError(
            f"--prompts {path}: no rows with prompt_id and prompt; dump_prompts.py --output_format=csv writes them."
        )
    return {row["prompt_id"]: row["prompt"] for row in rows}


def read_corpus(path: Path) -> list[str]:
    """Names of a corpus's documents, in order.

    Raises:
        ConfigError: no such file, or a line without a "pid".
    """
    if not path.is_file():
        raise ConfigError(f"--corpus {path}: there is no such file.")
    names = []
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                names.append(json.loads(line.decode("utf-8"))["pid"])
            except (ValueError, KeyError, TypeError, RecursionError):
                raise ConfigError(f'--corpus {path}, line {number}: not an object with a "pid".') from None
    return names


def answers_in(text: str, corpus: Sequence[str] | None = None) -> list[Any]:
    """The list in the first line of a text that has one; empty if there is none.

    Args:
        corpus: names of documents, by the numbers in the list; other numbers are dropped.
    """
    for line in text.replace("*", "").replace("`", "").splitlines():
        begin, end = line.find("["), line.rfind("]")
        if not 0 <= begin < end:
            continue
        try:
            answers = ast.literal_eval(line[begin : end + 1])
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            # Apostrophes in names, unquoted words, and anything else that a model may write between brackets.
            words = (word.strip().strip("'\"") for word in line[begin + 1 : end].split(","))
            answers = [word for word in words if word]
        if isinstance(answers, tuple):  # "[1], [2]"
            answers = [answer for part in answers for answer in (part if isinstance(part, list) else [part])]
        answers = [_plain(answer) for answer in answers if answer is not ...]
        if corpus is None:
            return answers
        most = len(str(len(corpus)))  # digits: int() refuses numbers of thousands of digits
        numbers = [int(str(answer)) for answer in answers if str(answer).isdecimal() and len(str(answer)) <= most]
        return [corpus[number] for number in numbers if number < len(corpus)]
    return []


def _plain(answer: Any) -> Any:
    """The answer if JSON can represent it, otherwise (a set, for example) its text."""
    try:
        json.dumps(answer)
    except TypeError:
        return str(answer)
    return answer


@command
def main(arguments: list[str] | None = None) -> None:
    parser = new_parser("farsight loft", __doc__)
    add = parser.add_argument
    add("model_dir", type=model_path)
    add("--prompts", type=Path, required=True, metavar="FILE", help="CSV of dump_prompts.py")
    add("--out", type=output_file, required=True, metavar="FILE", help="predictions, one line for each question")
    add("--corpus", type=Path, metavar="FILE", help="corpus.jsonl, for retrieval")
    add("--max-new-tokens", type=positive, default=1024, help="in an answer with its reasoning (%(default)s)")
    add("--batch-size", type=positive, default=1, help="prompts read together (%(default)s)")
    add_model_options(parser, foreign=True)
    options = parser.parse_args(arguments)

    from farsight.inference.generate.completions import generate, warn_of_long_prompts
    from farsight.inference.loading import load

    prompts = read_prompts(options.prompts)
    corpus = read_corpus(options.corpus) if options.corpus else None
    model = load(options.model_dir, options)
    tokenizer = model.tokenizer
    bos = [tokenizer.bos_id] if tokenizer.begins_with_bos and tokenizer.bos_id is not None else []
    encoded = [bos + tokenizer.encode(prompt) for prompt in prompts.values()]
    warn_of_long_prompts(model, encoded)
    with progress(total=sum(map(len, encoded)), desc="read", unit="token") as bar:
        completions = generate(
            model.decoder,
            tokenizer,
            encoded,
            options.max_new_tokens,
            rows_at_once=options.batch_size,
            bar=bar,
            end_tokens=model.end_tokens,
        )
    answered, lines = 0, []
    for question, completion in zip(prompts, completions, strict=True):
        answers = answers_in(completion.text, corpus)
        answered += bool(answers)
        row = {"qid": question, "num_turns": 1, "model_outputs": [answers], "metadata": {"text": completion.text}}
        lines.append(json.dumps(row, ensure_ascii=False) + "\n")
    # UTF-8 cannot encode half a surrogate pair: it is written as a JSON escape.
    write_text(options.out, "".join(lines).encode("utf-8", "backslashreplace").decode("utf-8"))
    print(f"{options.out}: {answered} of {len(prompts)} questions have an answer")


if __name__ == "__main__":
    main()
