import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flashflow.config.sections import DataSection, HuggingFaceData, JsonlData, ParquetData, ReasoningGymData
from flashflow.data.plain import plain
from flashflow.data.split import is_held_out
from flashflow.data.stream import make_stream
from flashflow.errors import ConfigError
from flashflow.records import Task

SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def jsonl(path: Path, rows: list) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def numbered(tmp_path: Path, count: int, **section):
    path = jsonl(tmp_path / "train.jsonl", [{"prompt": f"p{i}", "answer": i} for i in range(count)])
    return DataSection(source=JsonlData(path=path), **section)


def answers(stream, cursors) -> list[int]:
    return [stream.task(cursor).row["answer"] for cursor in cursors]


# ---- the stream


def test_every_pass_holds_every_row_once_in_an_order_of_its_own(tmp_path):
    stream = make_stream(numbered(tmp_path, 50), seed=3)
    first, second = answers(stream, range(50)), answers(stream, range(50, 100))
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second
    assert first != list(range(50))


def test_the_same_cursor_gives_the_same_task_in_any_order_of_asking(tmp_path):
    section = numbered(tmp_path, 20)
    forward = make_stream(section, seed=3)
    expected = {cursor: forward.task(cursor) for cursor in range(100)}
    backward = make_stream(section, seed=3)
    assert {cursor: backward.task(cursor) for cursor in reversed(range(100))} == expected
    assert make_stream(section, seed=4).task(0) != expected[0] or make_stream(section, seed=4).task(1) != expected[1]


def test_a_far_cursor_is_found_without_the_passes_before_it(tmp_path):
    stream = make_stream(numbered(tmp_path, 7), seed=0)
    start = 7 * 10**12
    assert sorted(answers(stream, range(start, start + 7))) == list(range(7))


def test_without_shuffle_the_order_is_the_files(tmp_path):
    stream = make_stream(numbered(tmp_path, 5, shuffle=False), seed=9)
    assert answers(stream, range(12)) == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]


def test_the_data_ends_after_its_epochs(tmp_path):
    stream = make_stream(numbered(tmp_path, 5, epochs=2), seed=0)
    assert stream.task(9) is not None
    assert stream.task(10) is None


def test_a_tasks_prompt_is_the_column_the_config_names(tmp_path):
    path = jsonl(tmp_path / "t.jsonl", [{"question": "2 + 2?", "answer": "4"}])
    stream = make_stream(DataSection(source=JsonlData(path=path), prompt_column="question"), seed=0)
    assert stream.task(0) == Task(cursor=0, row={"question": "2 + 2?", "answer": "4", "prompt": "2 + 2?"})


# ---- held-out problems


def test_held_out_problems_come_in_the_order_of_their_file(tmp_path):
    source = JsonlData(
        path=jsonl(tmp_path / "t.jsonl", [{"prompt": "a"}]),
        eval_path=jsonl(tmp_path / "e.jsonl", [{"prompt": "x"}, {"prompt": "y"}, {"prompt": "z"}]),
    )
    tasks = make_stream(DataSection(source=source), seed=5).eval_tasks(2)
    assert tasks == [Task(cursor=0, row={"prompt": "x"}), Task(cursor=1, row={"prompt": "y"})]


def test_a_held_out_prompt_among_the_training_rows_is_named(tmp_path):
    source = JsonlData(
        path=jsonl(tmp_path / "t.jsonl", [{"prompt": "a"}, {"prompt": "twice"}]),
        eval_path=jsonl(tmp_path / "e.jsonl", [{"prompt": "twice"}]),
    )
    with pytest.raises(ConfigError, match=r"training row 1 is also held out.*'twice'"):
        make_stream(DataSection(source=source), seed=0)


def test_too_few_held_out_problems_are_refused_with_the_remedy(tmp_path):
    with pytest.raises(ConfigError, match=r"evaluation.problems: 512.*holds out 0; set data.source.eval_path"):
        make_stream(numbered(tmp_path, 3), seed=0).eval_tasks(512)


def test_generated_questions_are_distinct_and_split_by_their_text():
    source = ReasoningGymData(task="chain_sum", options=SUMS, size=2_000)
    stream = make_stream(DataSection(source=source), seed=0)
    trained = [stream.task(cursor).row["prompt"] for cursor in range(len(stream))]
    held_out = [task.row["prompt"] for task in stream.eval_tasks(20)]
    assert len(set(trained)) == len(trained)
    assert not set(trained) & set(held_out)
    assert all(is_held_out(prompt) for prompt in held_out)
    assert not any(is_held_out(prompt) for prompt in trained)


def test_the_split_of_a_question_never_changes():
    # First byte of `printf '%s' TEXT | sha256sum`.
    assert is_held_out("1 + 4")  # 0xd7 = 215, a multiple of 5
    assert is_held_out("3 + 6")  # 0xb9 = 185
    assert not is_held_out("1 + 1")  # 0x72 = 114
    assert not is_held_out("2 + 2")  # 0xfd = 253


def test_runs_of_different_seeds_are_evaluated_on_the_same_problems():
    section = DataSection(source=ReasoningGymData(task="chain_sum", options=SUMS, size=300))
    assert make_stream(section, seed=0).eval_tasks(10) == make_stream(section, seed=1).eval_tasks(10)


def test_a_reasoning_gym_task_has_prompt_answer_and_plain_metadata():
    section = DataSection(source=ReasoningGymData(task="chain_sum", options=SUMS, size=20))
    row = make_stream(section, seed=0).task(0).row
    assert set(row) == {"prompt", "answer", "metadata"}
    left, operator, right = row["metadata"]["expression"].split()
    assert int(row["answer"]) == int(left) + int(right) * (1 if operator == "+" else -1)
    assert row["metadata"]["difficulty"]["num_terms"] == [2, 2]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"task": "chain_sun"}, "no 'chain_sun'; nearest: chain_sum"),
        ({"task": "chain_sum", "options": {"terms": 2}}, "chain_sum refuses"),
        ({"task": "chain_sum", "options": {"min_terms": 9, "max_terms": 2}}, "chain_sum refuses"),
        ({"task": "chain_sum", "options": {"size": 3}}, "size 3 belongs in data.source.size"),
    ],
)
def test_a_reasoning_gym_mistake_is_named(fields, message):
    with pytest.raises(ConfigError, match=message):
        make_stream(DataSection(source=ReasoningGymData(**fields, size=10)), seed=0)


# ---- files


def test_parquet_gives_the_rows_jsonl_gives(tmp_path):
    import pyarrow
    import pyarrow.parquet

    rows = [{"prompt": f"p{i}", "answer": i, "tags": ["a", "b"]} for i in range(10)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "t.parquet")
    from_parquet = make_stream(DataSection(source=ParquetData(path=tmp_path / "t.parquet")), seed=1)
    from_jsonl = make_stream(DataSection(source=JsonlData(path=jsonl(tmp_path / "t.jsonl", rows))), seed=1)
    assert [from_parquet.task(i) for i in range(15)] == [from_jsonl.task(i) for i in range(15)]


def test_a_saved_hugging_face_dataset_gives_its_splits(tmp_path):
    datasets = pytest.importorskip("datasets")
    splits = {
        "train": datasets.Dataset.from_list([{"prompt": "a", "answer": 1}, {"prompt": "b", "answer": 2}]),
        "test": datasets.Dataset.from_list([{"prompt": "c", "answer": 3}]),
    }
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "saved")
    source = HuggingFaceData(path=str(tmp_path / "saved"), eval_split="test")
    stream = make_stream(DataSection(source=source, shuffle=False), seed=0)
    assert stream.task(1) == Task(cursor=1, row={"prompt": "b", "answer": 2})
    assert stream.eval_tasks(1) == [Task(cursor=0, row={"prompt": "c", "answer": 3})]
    with pytest.raises(ConfigError, match=r"no 'dev' in .* which has \['test', 'train'\]"):
        make_stream(DataSection(source=source.model_copy(update={"eval_split": "dev"})), seed=0)


def test_load_dataset_reads_a_folder_of_files(tmp_path):
    pytest.importorskip("datasets")
    (tmp_path / "data").mkdir()
    jsonl(tmp_path / "data" / "train.jsonl", [{"prompt": "a"}, {"prompt": "b"}])
    jsonl(tmp_path / "data" / "test.jsonl", [{"prompt": "c"}])
    code = (
        "import sys\n"
        "from flashflow.config.sections import DataSection, HuggingFaceData\n"
        "from flashflow.data.stream import make_stream\n"
        "source = HuggingFaceData(path=sys.argv[1], eval_split='test')\n"
        "stream = make_stream(DataSection(source=source), 0)\n"
        "assert {stream.task(i).row['prompt'] for i in range(2)} == {'a', 'b'}\n"
        "assert stream.eval_tasks(1)[0].row == {'prompt': 'c'}\n"
    )
    caches = {"HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
    subprocess.run([sys.executable, "-c", code, tmp_path / "data"], env=os.environ | caches, check=True, timeout=60)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": "a"}\n{"prompt"\n', "line 2 is not JSON"),
        ("[1]\n", "line 1 is a list, not a JSON object"),
        ("\n", "has no rows"),
        ('{"question": "a", "answer": "b"}\n', "no 'prompt' in training row 0; the columns are answer, question"),
        ('{"prompt": "a"}\n{"prompt": 7}\n', "prompt of training row 1 is 7; expected a non-empty string"),
        ('{"prompt": [{"role": "user"}]}\n', "expected a non-empty string or a list of messages"),
    ],
)
def test_an_unusable_file_is_named_with_the_place(tmp_path, text, message):
    (tmp_path / "t.jsonl").write_text(text)
    with pytest.raises(ConfigError, match=message):
        make_stream(DataSection(source=JsonlData(path=tmp_path / "t.jsonl")), seed=0)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"no file .*absent\.parquet"):
        make_stream(DataSection(source=ParquetData(path=tmp_path / "absent.parquet")), seed=0)


# ---- plain types


def test_values_are_reduced_to_plain_types():
    import datetime
    import enum
    from fractions import Fraction

    import numpy as np

    class Colour(enum.Enum):
        RED = "red"

    value = {
        1: (1, 2.5, None, True),
        "numpy": [np.int64(3), np.float32(0.5), np.arange(2), np.bool_(True)],
        "other": [Colour.RED, Fraction(1, 3), datetime.date(2026, 1, 2), {"b", "a"}],
        "big": 2**70,
    }
    assert plain(value) == {
        "1": [1, 2.5, None, True],
        "numpy": [3, 0.5, [0, 1], True],
        "other": ["red", "1/3", "2026-01-02", ["a", "b"]],
        "big": "1180591620717411303424",
    }


# ---- imports


def test_reading_data_never_imports_torch():
    code = (
        "import sys; from flashflow.data import chat, sources, stream; import reasoning_gym, datasets, pyarrow.parquet;"
        "assert 'torch' not in sys.modules"
    )
    pytest.importorskip("datasets")
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_missing_package_is_named_with_the_command_that_installs_it(tmp_path):
    code = (
        "import sys; sys.modules['reasoning_gym'] = None\n"
        "from flashflow.config.sections import DataSection, ReasoningGymData\n"
        "from flashflow.data.stream import make_stream\n"
        "from flashflow.errors import ConfigError\n"
        "try: make_stream(DataSection(source=ReasoningGymData(task='chain_sum')), 0)\n"
        "except ConfigError as error: assert 'pip install reasoning-gym' in str(error), error\n"
        "else: raise SystemExit('no error')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
