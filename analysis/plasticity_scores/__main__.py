"""Sets the plasticity of several models against their scores on a benchmark (plasticity thesis, Table 6.3 and Figure 6.7).

    farsight plasticity ONE TWO THREE --data FILE --json plasticity.json
    farsight harness ONE TWO THREE --tasks ruler --json ruler.json
    farsight plasticity-scores plasticity.json --scores ruler.json --picture F.png
    farsight plasticity-scores plasticity.json --scores published.csv --score longbench_pro --json F
    farsight plasticity-scores plasticity.json --scores ONE=one_chat.json TWO=two_chat.json

Prints a line per model, sorted by score, and the correlations of AP overall, AP of the first and last 20 %, and AP_drop with the
score: Pearson's with the two-sided p-value of no correlation (t distribution with n - 2 degrees of freedom), and Spearman's with
that of all orders of the models (by the same t distribution if there are more than eight).

--scores takes what farsight needle and farsight harness write, with NAME=FILE for a file of another model or of none, such as
those of farsight external or of the chat model made from the one that was measured; and CSV files with the columns "model" and
any scores, and "family" if wanted, for published figures. A model is named by its path or the end of it. Models without both
figures are left out, and named.
"""

from pathlib import Path

from farsight.cli import command, new_parser
from farsight.outputs import add_output_options, write_json, write_picture


@command
def main(arguments: list[str] | None = None) -> None:
    parser = new_parser("farsight plasticity-scores", __doc__)
    add = parser.add_argument
    add("plasticity", type=Path, nargs="+", metavar="FILE", help="JSON of farsight plasticity, of one or more models")
    add("--scores", nargs="+", required=True, metavar="[NAME=]FILE", help="results of benchmarks: JSON, or CSV")
    add(
        "--score",
        metavar="NAME",
        help="task, group, column or TASK@LENGTH to take (default: the only one that all models have, or their mean)",
    )
    add_output_options(parser)
    options = parser.parse_args(arguments)

    from farsight.analysis.plasticity_scores.compare import compare
    from farsight.analysis.plasticity_scores.picture import draw
    from farsight.analysis.plasticity_scores.table import table

    figures = compare(options.plasticity, options.scores, options.score)
    print(table(figures))
    write_json(options.json, figures)
    write_picture(options.picture, draw, figures)


if __name__ == "__main__":
    main()
