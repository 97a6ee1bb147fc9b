"""Writes documents that teach a small model to retrieve: text with passkeys in it, questions about them, and the answers.
Each line of the file is {"text": …}, as [[data.sources]] kind = "jsonl" reads it.

  farsight needles --out needles.jsonl --documents 1000 --tokens 512 --seed 0
  farsight needles --out needles.jsonl --documents 1000 --tokens 128 --tokenizer tokenizers/needles --same 8

With --same, all documents share one short text. The model soon knows it by heart, and retrieval is all that is left to
learn: small models learn it many times sooner. Train on such documents first, and on ones without --same after them.
Every document has exactly --tokens tokens, bos and eos included: train with this sequence length, and none is cut.
The same options give the same file.
"""

from pathlib import Path

from farsight.cli import command, natural, new_parser, positive
from farsight.outputs import output_file


@command
def main(arguments: list[str] | None = None) -> None:
    parser = new_parser("farsight needles", __doc__)
    parser.add_argument("--out", type=output_file, required=True, metavar="FILE", help="the .jsonl file to write")
    parser.add_argument("--documents", type=positive, required=True, metavar="N", help="how many")
    parser.add_argument("--tokens", type=positive, required=True, help="length of each, bos and eos included")
    parser.add_argument("--seed", type=natural, default=0, help="draws the documents (0)")
    parser.add_argument("--tokenizer", type=Path, metavar="DIR", help="counts the tokens (default: bytes)")
    parser.add_argument(
        "--same",
        type=natural,
        default=0,
        metavar="N",
        help="use the same N sentences of text in every document (default: new ones)",
    )
    parser.add_argument("--questions", type=positive, default=12, metavar="N", help="most questions in a document (12)")
    options = parser.parse_args(arguments)

    from farsight.data.retrieval.documents import write_documents
    from farsight.data.tokenizers.tokenizer import BytesTokenizer, load_tokenizer_dir
    from farsight.remote import local

    tokenizer = load_tokenizer_dir(local(options.tokenizer, weights=False)) if options.tokenizer else BytesTokenizer()
    missed = write_documents(
        options.out, tokenizer, options.documents, options.tokens, options.seed, options.same, options.questions
    )
    print(f"{options.out}: {options.documents:,} documents of {options.tokens:,} tokens; {missed:,} missed the length")


if __name__ == "__main__":
    main()
