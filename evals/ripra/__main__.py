"""Diagnoses RiPRA on a text: what its layers find relevant, and how sharing positions within a block of a prompt changes results.

    farsight ripra MODEL_DIR --data FILE --length 8192 --json F --picture F.png
    farsight ripra MODEL_DIR --passkeys 10 --length 8192 --picture F.png
    farsight ripra MODEL_DIR --data QUESTIONS.jsonl --evidence 1200:1216 5030:5046 --extend ripra:chunk=128

Reads the first --length tokens of the first document (0: all of them), or of one document for each --evidence; the last token is
the query. With --passkeys the documents are generated prompts, whose evidence is known. Prints and writes

- the similarity of layers: cosines between the relevance of all chunks to the query in each pair of layers (figure 3 of the
  paper), and of each layer with the anchor whose positions it takes;
- where evidence is known, the relevance of the chunk that holds each document's evidence and of its neighbours, in the last anchor
  layer, and its rank among all chunks (figure 4);
- the error of blocks: how far the positions that a prompt's queries take from their block lie from those that each would have on
  its own, and the effect on the logits at the same tokens.

Every layer's queries are held while it reads, beside the cache: 8.6 GB for an 8B model at 32,768 tokens in bfloat16.
The method itself is inference/extend/ripra.py; --extend ripra:KEY=VALUE,… sets its options.
"""

from pathlib import Path

from farsight.cli import command, model_path, natural, new_parser, positive
from farsight.inference.model_options import add_model_options
from farsight.outputs import add_output_options, write_json, write_picture


@command
def main(arguments: list[str] | None = None) -> None:
    parser = new_parser("farsight ripra", __doc__)
    add = parser.add_argument
    add("model_dir", type=model_path)
    texts = parser.add_mutually_exclusive_group(required=True)
    texts.add_argument("--data", type=Path, metavar="FILE", help='UTF-8 text, or .jsonl with a "text"')
    texts.add_argument(
        "--passkeys", type=positive, metavar="N", help="this many prompts of --length tokens, each with a passkey"
    )
    add("--length", type=natural, default=0, help="tokens to read of each document; 0 reads all")
    add("--evidence", nargs="+", default=[], metavar="START:END", help="tokens of each document that hold its evidence")
    add_model_options(parser, foreign=True)
    parser.set_defaults(extend="ripra")
    add_output_options(parser)
    options = parser.parse_args(arguments)
    if options.passkeys is not None and (options.length < 1 or options.evidence):
        parser.error("--passkeys needs a --length of 1 or more and no --evidence: it knows where its passkeys are")

    from farsight.data.texts import encode_file
    from farsight.errors import ConfigError
    from farsight.evals.ripra.diagnose import (
        check_extension,
        diagnose,
        passkey_prompts,
        read_spans,
        smaller_chunk,
        table,
    )
    from farsight.evals.ripra.picture import draw
    from farsight.inference.loading import load

    loaded = load(options.model_dir, options)
    check_extension(loaded)
    if options.passkeys is not None:
        documents, evidence = passkey_prompts(loaded.tokenizer, options.passkeys, options.length)
    else:
        documents = encode_file(options.data, loaded.tokenizer)[: len(options.evidence) or 1]
        documents = [document[: options.length] if options.length else document for document in documents]
        evidence = read_spans(options.evidence, documents)
    result = diagnose(loaded, documents, evidence)
    print(table(result))
    write_json(options.json, result)
    if options.picture and result["similarity"] is None:
        raise ConfigError(f"--picture {options.picture}: the whole text is one chunk; {smaller_chunk(result)}.")
    write_picture(options.picture, draw, result)


if __name__ == "__main__":
    main()
