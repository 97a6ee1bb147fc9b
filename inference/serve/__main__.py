"""Serves a model to other programs, as an endpoint that speaks OpenAI's API.

    farsight serve MODEL_DIR
    farsight serve MODEL_DIR --extend ripra --max-length 32768 --port 8000
    farsight serve runs/X/checkpoint/step-1000 --name my_model --chat-template template.jinja

Takes model directories of every kind, adapters and checkpoints. Suites that can ask an OpenAI-compatible server are pointed at
http://127.0.0.1:8000/v1: EvalPlus, LongBench v2, LongBench-Pro, lm-eval's local-completions (docs/inference/serve.md). It has
/v1/completions (text or token ids; echo and logprobs), /v1/chat/completions (the tokenizer's chat template), /v1/models and
/health; answers stream if asked to. Requests that wait are read together. Needs the extra `serve` (`pip install '.[serve]'`).

It listens on this machine alone unless --host says otherwise, and has no keys. Ctrl-C or SIGTERM completes running answers
and ends it; a second one ends it at once.
"""

from pathlib import Path

from farsight.cli import bounded, command, model_path, new_parser, positive
from farsight.inference.model_options import add_model_options


@command
def main(arguments: list[str] | None = None) -> None:
    parser = new_parser("farsight serve", __doc__)
    add = parser.add_argument
    add("model_dir", type=model_path, help="model directory, adapter, or step-N folder of a checkpoint")
    add("--host", default="127.0.0.1", metavar="ADDRESS", help="address to listen on (%(default)s)")
    add("--port", type=bounded(int, least=0, most=65535), default=8000, help="0 takes a free one (%(default)s)")
    add("--name", help="the model's name in requests (default: MODEL_DIR as written)")
    add(
        "--chat-template",
        type=Path,
        metavar="FILE",
        help="Jinja file to use in place of the tokenizer's own chat template",
    )
    add("--max-length", type=positive, help="most tokens of a prompt and its answer (default: the trained length)")
    add("--rows", type=positive, default=8, help="most prompts read together (%(default)s)")
    add("--queue", type=positive, default=256, help="most answers that wait; more are refused (%(default)s)")
    add_model_options(parser, foreign=True)
    options = parser.parse_args(arguments)

    from farsight.inference.serve.run import run

    run(options)


if __name__ == "__main__":
    main()
