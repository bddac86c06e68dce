"""Data files and model folders of this host are looked into before anything starts."""

import json
import subprocess
import sys

import pyarrow as pa
import pytest
from pyarrow import parquet

from flashflow.config import load_config
from flashflow.config.cautions import cautions
from flashflow.config.data_files import look_into
from flashflow.config.report import derived_numbers
from flashflow.errors import ConfigError

ROWS = [{"question": f"{n} plus {n}?", "answer": str(2 * n)} for n in range(5)]


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_parquet(path, rows):
    columns = {name: [row[name] for row in rows] for name in ("question", "answer")}
    parquet.write_table(pa.table(columns, schema=pa.schema([(name, pa.string()) for name in columns])), path)


WRITERS = {"jsonl": write_jsonl, "parquet": write_parquet}


@pytest.fixture(params=sorted(WRITERS))
def kind(request):
    return request.param


@pytest.fixture
def make(tmp_path):
    """A function that writes rows as both data files, and gives the path of a config of them."""

    def write(kind, train=ROWS, held_out=ROWS, model="org/name"):
        for name, rows in (("train", train), ("eval", held_out)):
            WRITERS[kind](tmp_path / f"{name}.{kind}", rows)
        source = {"kind": kind, "path": f"{tmp_path}/train.{kind}", "eval_path": f"{tmp_path}/eval.{kind}"}
        path = tmp_path / "config.yaml"
        values = {
            "model": {"path": str(model)},
            "reward": {"function": "json:dumps"},
            "data": {"source": source, "prompt_column": "question"},
        }
        path.write_text(json.dumps(values))
        return path

    return write


def mistakes(path, *overrides):
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return [mistake.removesuffix(" (command line)") for mistake in caught.value.mistakes]


def test_files_with_the_column_and_enough_rows_are_right(make, kind):
    load_config(make(kind), ["evaluation.every_steps=1", "evaluation.problems=5"])


def test_a_prompt_column_that_no_file_has_is_named_with_the_nearest(make, kind, tmp_path):
    assert mistakes(make(kind), "data.prompt_column=quesion") == [
        f"data.prompt_column: 'quesion' is no column of data.source.{name} '{tmp_path}/{part}.{kind}'; "
        "did you mean question?"
        for name, part in (("path", "train"), ("eval_path", "eval"))
    ]


def test_more_problems_than_held_out_rows_are_too_many_when_evaluated(make, kind, tmp_path):
    path = make(kind)
    assert mistakes(path, "evaluation.every_steps=1", "evaluation.problems=6") == [
        f"evaluation.problems: 6 is more than the 5 rows of data.source.eval_path '{tmp_path}/eval.{kind}'; "
        "ask fewer problems, or hold out more"
    ]
    load_config(path, ["evaluation.problems=6"])


def test_a_file_without_rows_trains_nothing_but_may_be_held_out(make, kind):
    assert "has no rows to train on" in mistakes(make(kind, train=[]))[0]
    load_config(make(kind, held_out=[]))


def test_blank_lines_are_no_rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('\n{"a": 1}\n \n\n{"a": 2, "b": 3}\n\n')
    assert look_into(path, "jsonl", 9) == (["a"], 2)
    assert look_into(path, "jsonl", 1) == (["a"], 1)


def test_nothing_is_read_past_what_was_asked(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a": 1}\n{"a": 2}\n' + b" " * 100_000 + b"\xff\n")
    assert look_into(path, "jsonl", 2).num_rows == 2
    with pytest.raises(ValueError, match="invalid start byte"):
        look_into(path, "jsonl", 3)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"{'question': 1}\n", "line 1 is not JSON"),
        (b"\n[1]\n", "line 2 is a list, not a JSON object"),
        (b"\xff\xfe\n", "invalid start byte"),
    ],
)
def test_a_first_line_that_is_no_row_is_told(make, tmp_path, content, says):
    path = make("jsonl")
    (tmp_path / "train.jsonl").write_bytes(content)
    (mistake,) = mistakes(path)
    assert mistake.startswith(f"data.source.path: '{tmp_path}/train.jsonl' cannot be read: ")
    assert says in mistake
    assert "; name a jsonl file" in mistake


def test_an_empty_object_has_no_prompt(make):
    assert "its first row is empty" in mistakes(make("jsonl", train=[{}]))[0]


def test_a_file_that_is_no_parquet_is_told(make, tmp_path):
    path = make("parquet")
    (tmp_path / "train.parquet").write_text("question\n1\n")
    (mistake,) = mistakes(path)
    assert "train.parquet' cannot be read: not a Parquet file: " in mistake


def model_folder(folder, description):
    folder.mkdir()
    (folder / "config.json").write_text(description)
    return folder


@pytest.mark.parametrize(
    "description",
    ['{"max_position_embeddings": 1024}', '{"text_config": {"max_position_embeddings": 1024}}'],
)
def test_a_context_above_the_models_is_refused(make, tmp_path, description):
    path = make("jsonl", model=model_folder(tmp_path / "model", description))
    assert mistakes(path, "engine.max_context_tokens=1025") == [
        "engine.max_context_tokens: 1025 is more than max_position_embeddings 1024 of "
        f"model.path '{tmp_path}/model'; lower it to 1024 or less"
    ]
    load_config(path, ["engine.max_context_tokens=1024"])


@pytest.mark.parametrize(
    "description",
    ["{}", '{"text_config": {}}', '{"text_config": null}', "[1]", "{", '{"max_position_embeddings": null}'],
)
def test_a_model_that_does_not_say_its_context_is_let_through(make, tmp_path, description):
    load_config(make("jsonl", model=model_folder(tmp_path / "model", description)))


def test_a_folder_without_a_description_is_let_through(make, tmp_path):
    (tmp_path / "model").mkdir()
    load_config(make("jsonl", model=tmp_path / "model"))


SMALL = json.dumps(
    {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32, "head_dim": 8}
)
"""256 bytes a token: 2 layers x keys and values x 2 heads x 8 numbers of 4 bytes."""
CONTEXT = ["engine.max_context_tokens=500", "engine.slots=8", "sampling.max_new_tokens=50"]
"""Kept as 512 tokens; 513 x 256 = 131,328 bytes with the scratch token."""


def test_a_cache_that_cannot_hold_one_sequence_is_refused(make, tmp_path):
    path = make("jsonl", model=model_folder(tmp_path / "model", SMALL))
    assert mistakes(path, *CONTEXT, "engine.kv_cache_bytes=131327") == [
        "engine.kv_cache_bytes: 131327 is less than the 131328 that one sequence of engine.max_context_tokens 500 "
        f"needs with model.path '{tmp_path}/model'; raise the first or lower the second"
    ]
    load_config(path, [*CONTEXT, "engine.kv_cache_bytes=131328"])


def test_a_cache_below_what_the_slots_need_is_a_caution_and_its_size_is_printed(make, tmp_path):
    path = make("jsonl", model=model_folder(tmp_path / "model", SMALL))
    bounded = load_config(path, [*CONTEXT, "engine.kv_cache_bytes=300000"])
    assert any(
        "engine.kv_cache_bytes: 300000 holds 2 sequences of engine.max_context_tokens 500, while engine.slots 8 need "
        "1048832" in text
        for text in cautions(bounded)
    )
    free = load_config(path, CONTEXT)
    assert not any("kv_cache_bytes" in text for text in cautions(free))
    values = [{number.name: number.value for number in derived_numbers(one)} for one in (free, bounded)]
    assert [value["engine cache"] for value in values] == ["1.0 MiB", "<= 0.3 MiB"]


def test_a_hub_models_cache_is_given_in_tokens(make):
    numbers = {number.name: number.value for number in derived_numbers(load_config(make("jsonl"), CONTEXT))}
    assert numbers["engine cache"] == "4,097 tokens"


def test_looking_into_files_imports_no_torch(make, kind):
    code = (
        "import sys; from flashflow.config import load_config\n"
        "load_config(sys.argv[1], sys.argv[2:])\n"
        "assert not {'torch', 'transformers', 'pandas'} & sys.modules.keys()"
    )
    arguments = [str(make(kind)), "evaluation.every_steps=1", "evaluation.problems=5"]
    result = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr
