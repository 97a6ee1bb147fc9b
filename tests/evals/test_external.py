"""Result files of other harnesses, in the formats that their repositories write.

Where the forms were seen: princeton-nlp/HELMET eval.py (`run_test`, the dictionary `output`), eval_alce.py, scripts/eval_gpt4_*.py
and scripts/collect_results.py; google-deepmind/loft run_evaluation.py (`final_metrics`) and the table of its README;
OpenLMLab/LEval Evaluation/auto_eval.py and em.py (what they print); caskcsg/longcontext LongBench-Pro/modules/evaluation.py
(`metric_summary`) and the summaries in its output folder.
"""

import json
from pathlib import Path

import pytest

from farsight.errors import ConfigError
from farsight.evals import loft
from farsight.evals.external import figures_of, main, read
from farsight.evals.loft import answers_in
from farsight.inference.generate.completions import Completion
from tests.evals.test_harness import make_model


def helmet(
    folder: Path, dataset: str, length: int = 131072, rows: int = 2, gpt4: dict | None = None, **averages
) -> Path:
    name = f"{dataset}_v1_test_in{length}_size100_shots2_sampFalsemax50min0t0.0p1.0_chatFalse_42.json"
    content = {
        "args": {"datasets": dataset, "input_max_length": length, "tag": "v1"},
        "data": [{"output": "x"}] * rows,
        "metrics": {key: [0.5] * rows for key in averages},
        "averaged_metrics": {**averages, "input_len": 130000.0},
        "throughput": 0.1,
    }
    (folder / name).write_text(json.dumps(content))
    (folder / f"{name}.score").write_text(json.dumps(content["averaged_metrics"]))
    if gpt4 is not None:
        judged = {**content, "averaged_metrics": {**content["averaged_metrics"], **gpt4}}
        (folder / name.replace(".json", "-gpt4eval_o.json")).write_text(json.dumps(judged))
    return folder / name


@pytest.fixture
def helmet_run(tmp_path):
    for dataset in ("ruler_niah_mk_2", "ruler_niah_mk_3", "ruler_niah_mv"):
        helmet(tmp_path, dataset, ruler_recall=40.0)
    helmet(tmp_path, "json_kv", substring_exact_match=80.0, exact_match=3.0)
    for dataset in ("kilt_nq", "kilt_triviaqa", "kilt_hotpotqa", "kilt_popqa_3"):
        helmet(tmp_path, dataset, substring_exact_match=50.0)
    for dataset in (
        "trec_coarse_6600shot",
        "trec_fine_6400shot",
        "banking77_5900shot",
        "clinic150_7050shot",
        "nlu_8296shot",
    ):
        helmet(tmp_path, f"icl_{dataset}_balance", exact_match=60.0)
    helmet(tmp_path, "msmarco_rerank_psg", **{"NDCG@10": 30.0})
    helmet(tmp_path, "infbench_qa_eng_130862", rougeL_f1=20.0)
    helmet(tmp_path, "infbench_choice_eng_130862", exact_match=40.0)
    helmet(tmp_path, "narrativeqa_130772", rougeL_f1=9.0, gpt4={"gpt-4-score": 1.5})
    for dataset in ("infbench_sum_eng_129672", "multi_lexsum_130372"):
        helmet(tmp_path, dataset, rougeL_f1=9.0, gpt4={"gpt-4-f1": 0.25})
    for dataset, recall in (("alce_asqa_700", "str_em"), ("alce_qampari_700", "qampari_rec_top5")):
        path = helmet(tmp_path, dataset)
        path.with_name(f"{path.name}.score").write_text(
            json.dumps({recall: 12.0, "citation_rec": 6.0, "citation_prec": 3.0})
        )
    (tmp_path / "notes.json").write_text('["no result"]')
    return tmp_path


def test_helmet(helmet_run):
    figures = figures_of(read([helmet_run]))
    results, means = figures["results"], figures["means"]
    assert len(results) == 4 + 4 + 5 + 1 + 3 + 2 + 6
    row = results["helmet/json_kv@131072"]
    assert (row["value"], row["metric"], row["n"]) == (0.8, "substring_exact_match", 2)
    assert results["helmet/narrativeqa_130772@131072"]["value"] == 0.5  # of 3
    assert results["helmet/multi_lexsum_130372@131072"]["value"] == 0.25
    assert results["helmet/alce_asqa_700:citation_prec@131072"]["value"] == 0.03
    expected = {
        "Recall": 0.5, "RAG": 0.5, "ICL": 0.6, "Re-rank": 0.3, "LongQA": (0.5 + 0.2 + 0.4) / 3, "Summ": 0.25, "Cite": 0.07,
    }  # fmt: skip
    for category, mean in expected.items():
        assert means[f"helmet/{category}@131072"] == pytest.approx(mean)
    assert means["helmet@131072"] == pytest.approx(sum(expected.values()) / 7)


def replaced(value, by):
    """The JSON value with something else in one place after another."""
    if isinstance(value, dict):
        for key in value:
            for inner in (by, *replaced(value[key], by)):
                yield {**value, key: inner}
            yield {k: v for k, v in value.items() if k != key}


@pytest.mark.parametrize("by", [None, 3, "x", [], {}, True])
def test_results_of_any_other_shape_end_in_a_sentence(tmp_path, by):
    loft_folder = tmp_path / "rag" / "nq" / "128k"
    loft_folder.mkdir(parents=True)
    loft_file, pro_file = loft_folder / "dev_predictions_metrics.json", tmp_path / "my_summary.json"
    loft_file.write_text(json.dumps({"quality": {"em": 0.1, "subspan_em": 0.3}, "num_unanswered_queries": 0}))
    pro_file.write_text(
        json.dumps(
            {"average_overall_metric": 0.5, "total_questions_num": 3, "average_language_metric": {"English": 0.5}}
        )
    )
    statuses = []
    for path in (helmet(tmp_path, "kilt_nq", substring_exact_match=50.0), loft_file, pro_file):
        for content in replaced(json.loads(path.read_text()), by):
            path.write_text(json.dumps(content))
            try:
                main([str(path)])
            except SystemExit as stopped:
                statuses.append((stopped.code, path.name, content))
    assert {status for status, *_ in statuses} == {2}, [each for each in statuses if each[0] != 2]


def test_helmet_leaves_out_what_no_judge_has_seen(helmet_run, caplog):
    for path in helmet_run.glob("*-gpt4eval_o.json"):
        path.unlink()
    means = figures_of(read([helmet_run]))["means"]
    assert "narrativeqa" in caplog.text
    assert "gpt-4-f1" in caplog.text
    assert {"helmet/LongQA@131072", "helmet/Summ@131072", "helmet@131072"}.isdisjoint(means)
    assert means["helmet/RAG@131072"] == 0.5


def test_helmet_scores_without_their_file_are_known_by_name(tmp_path):
    path = helmet(tmp_path, "kilt_nq", 8192, substring_exact_match=25.0)
    path.unlink()
    (figure,) = read([tmp_path])
    assert (figure.value, figure.group, figure.n) == (0.25, "helmet/RAG@8192", None)
    helmet(tmp_path, "other_task", exact_match=1.0)
    with pytest.raises(ConfigError, match="other_task is none of HELMET's data sets"):
        read([tmp_path])


def test_loft(tmp_path):
    metrics = {"recall@1": 0.5, "mrecall@2": 0.25, "mrecall@3": 0.125, "mrecall@5": 0.75, "capped_recall@1": 0.5}
    for task, dataset, quality in (
        ("retrieval", "nq", metrics),
        ("retrieval", "hotpotqa", metrics),
        ("retrieval", "quest", metrics),
        ("rag", "nq", {"em": 0.1, "subspan_em": 0.3, "f1": 0.2}),
    ):
        folder = tmp_path / "outputs" / task / dataset / "128k"
        folder.mkdir(parents=True)
        (folder / "dev_predictions_metrics.json").write_text(
            json.dumps({"quality": quality, "num_unanswered_queries": 0})
        )
        (folder / "dev_predictions_metrics_per_line.jsonl").write_text('{"qid": "a"}\n{"qid": "b"}\n')
    figures = figures_of(read([tmp_path]))
    assert {name: row["value"] for name, row in figures["results"].items()} == {
        "loft/rag/nq@128k": 0.3,
        "loft/retrieval/hotpotqa@128k": 0.25,
        "loft/retrieval/nq@128k": 0.5,
        "loft/retrieval/quest@128k": 0.125,
    }
    assert figures["results"]["loft/rag/nq@128k"]["n"] == 2
    assert figures["means"]["loft/retrieval@128k"] == pytest.approx(0.875 / 3)
    stray = tmp_path / "stray_metrics.json"
    stray.write_text(json.dumps({"quality": metrics, "num_unanswered_queries": 0}))
    with pytest.raises(ConfigError, match="TASK/DATASET/LENGTH"):
        read([stray])


def test_longbench_pro(tmp_path):
    summary = {
        "date": "2026-01-01",
        "total_questions_num": 1500,
        "inference_iterations": 3,
        "average_overall_metric": 0.25,
        "inference_iteration_1_overall_metric": 0.2,
        "average_token_length_metric": {"8k": 0.5, "256k": 0.125},
        "average_language_metric": {"Chinese": 0.2, "English": 0.3},
        "BoN-1": {"overall_metric": 0.2},
        "pass@1": 0.05,
    }
    (tmp_path / "nonthinking_context-120000_bon-3_summary.json").write_text(json.dumps(summary))
    results = figures_of(read([tmp_path]))["results"]
    assert {name: row["value"] for name, row in results.items()} == {
        "longbench_pro": 0.25,
        "longbench_pro@8k": 0.5,
        "longbench_pro@256k": 0.125,
        "longbench_pro/Chinese": 0.2,
        "longbench_pro/English": 0.3,
    }
    assert results["longbench_pro"]["n"] == 1500


def leval_text(task: str, *lines: str) -> str:
    head = f"loading from Predictions/exam_eval/model/{task}.pred.jsonl, there are 8 samples\nbegin evaluating: exam\n"
    return head + "A A | score=1\n====================\n" + "\n".join(lines) + "\n"


def leval_metrics(key: str, value: float) -> str:
    metrics = {key: value, "num_predicted": 8, "mean_prediction_length_characters": 1.0, "LEval_score": value}
    return str({**metrics, "display_keys": [key], "display": [value]})


def test_leval(tmp_path):
    (tmp_path / "quality.txt").write_text(leval_text("quality", leval_metrics("exact_match", 64.85)))
    parts = [
        f"loyalty score: {leval_metrics('exact_match', 60.0)}",
        f"fact score: {leval_metrics('exact_match', 80.0)}",
    ]
    (tmp_path / "sci_fi.txt").write_text(leval_text("sci_fi", *parts, "average score of fact and loyalty: 70.0"))
    (tmp_path / "other.txt").write_text("no result\n")
    figures = figures_of(read([tmp_path]))
    assert figures["results"]["leval/quality"]["value"] == pytest.approx(0.6485)
    assert figures["results"]["leval/quality"]["n"] == 8
    assert figures["results"]["leval/sci_fi"]["value"] == pytest.approx(0.7)
    assert figures["means"] == {"leval/exact_match": pytest.approx((0.6485 + 0.7) / 2)}


def test_the_command_and_its_errors(tmp_path, capsys):
    path = helmet(tmp_path, "kilt_nq", substring_exact_match=50.0)
    main([str(path), "--json", str(tmp_path / "out.json")])
    assert "helmet/kilt_nq@131072" in capsys.readouterr().out
    assert json.loads((tmp_path / "out.json").read_text())["results"]["helmet/kilt_nq@131072"]["value"] == 0.5
    unknown = tmp_path / "unknown.json"
    unknown.write_text("{}")
    with pytest.raises(SystemExit, match="averaged_metrics"):
        main([str(unknown)])
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit, match="holds no results"):
        main([str(tmp_path / "empty")])
    with pytest.raises(SystemExit, match="no file or folder"):
        main([str(tmp_path / "nowhere")])
    twice = path.with_name(path.name.replace("_42.json", "_43.json"))
    twice.write_text(path.read_text())
    with pytest.raises(SystemExit, match=r"both give helmet/kilt_nq@131072"):
        main([str(tmp_path)])


@pytest.mark.parametrize(
    ("text", "answers"),
    [
        (
            "Some thoughts [here.\nFinal Answer: ['the following day', 'Spain']\n['later']",
            ["the following day", "Spain"],
        ),
        ("**Final Answer: [1, 0, 7]**", [1, 0, 7]),
        ("Final Answer: ['the devil's sleep', 'Spain']", ["the devil's sleep", "Spain"]),
        ("Final Answer: [Spain]", ["Spain"]),
        ("Final Answer: [[3, 'a'], [4, 'b']]", [[3, "a"], [4, "b"]]),  # rows of a table
        ("I do not know", []),
        ("Final Answer: []", []),
        ("Final Answer: [...]", []),
        ("[{1, 2}]", ["{1, 2}"]),
        ("[{['a']: 1}]", ["{['a']: 1}"]),
        ("[1], [2]", [1, 2]),
        ("[" * 300 + "]" * 300, ["[" * 299 + "]" * 299]),
    ],
)
def test_answers_to_loft_s_prompts(text, answers):
    assert answers_in(text) == answers
    json.dumps(answers_in(text))


def test_answers_of_loft_s_retrieval_are_documents():
    documents = ["doc5", "doc6", "doc7"]
    assert answers_in("Final Answer: [2, 0, 9]", documents) == ["doc7", "doc5"]
    assert answers_in("Final Answer: [1], [2]", documents) == ["doc6", "doc7"]
    assert answers_in(f"[2, {'9' * 5000}, 1.5]", documents) == ["doc7"]


def test_loft_predictions(tmp_path, monkeypatch, capsys):
    """From the CSV that pandas writes for dump_prompts.py's rows to the lines that run_evaluation.py reads."""
    model = make_model(tmp_path)
    long = "word, " * 30_000  # longer than a field of a CSV file may be by default
    lines = [
        ",prompt_id,prompt,targets",
        '0,test1,"Who? ""A"" or B\nFinal Answer:","((\'A\',),)"',
        f'1,test2,"{long}","((),)"',
    ]
    (tmp_path / "prompts.csv").write_text("\n".join(lines) + "\n")
    (tmp_path / "corpus.jsonl").write_text('{"pid": "doc5"}\n{"pid": "doc6"}\n')
    asked = []

    def generate(decoder, tokenizer, prompts, new_tokens, **_):
        asked.extend(tokenizer.decode(prompt) for prompt in prompts)
        assert all(prompt[0] == tokenizer.bos_id for prompt in prompts)
        return [Completion((), " [1]", "length"), Completion((), "?", "length")]

    monkeypatch.setattr("farsight.inference.generate.completions.generate", generate)
    out = tmp_path / "test_predictions.jsonl"
    loft.main(
        [
            str(model),
            "--prompts",
            str(tmp_path / "prompts.csv"),
            "--corpus",
            str(tmp_path / "corpus.jsonl"),
            "--out",
            str(out),
        ]
    )
    assert asked == ['Who? "A" or B\nFinal Answer:', long]
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["qid"], row["num_turns"], row["model_outputs"]) for row in rows] == [
        ("test1", 1, [["doc6"]]),
        ("test2", 1, [[]]),
    ]
    assert "1 of 2 questions" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="no rows with prompt_id"):
        loft.main([str(model), "--prompts", str(tmp_path / "corpus.jsonl"), "--out", str(out)])
