import json
import math

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from flashflow.errors import ContractError
from flashflow.observe.metrics import REQUIRED_STEP_KEYS, MetricsWriter, read_metrics


def record(step, **changes):
    figures = dict.fromkeys(REQUIRED_STEP_KEYS, 0.5)
    return {**figures, "step": step, "version": step, "staleness_histogram": {"0": 6, "1": 2}, **changes}


def lines(folder):
    return (folder / "metrics.jsonl").read_text().splitlines()


def test_a_step_is_one_line_that_is_there_at_once(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(record(1, reward_mean=np.float32(0.25), groups=np.int64(8), note="x", eval_accuracy=None))
        (line,) = lines(tmp_path)
    step = json.loads(line)
    assert step["reward_mean"] == 0.25
    assert step["groups"] == 8
    assert step["staleness_histogram"] == {"0": 6, "1": 2}
    assert step["note"] == "x"
    assert step["eval_accuracy"] is None
    assert step["nonfinite_values"] == 0


def test_values_json_cannot_hold_are_null_and_counted(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(
            record(1, loss=math.nan, r_max=math.inf, by_lag={"0": -math.inf, "1": 1.0}, parts=[np.float32("nan")])
        )
    (step,) = read_metrics(tmp_path / "metrics.jsonl")
    assert (step["loss"], step["r_max"], step["by_lag"], step["parts"]) == (None, None, {"0": None, "1": 1.0}, [None])
    assert step["nonfinite_values"] == 4


def test_missing_keys_are_named_and_nothing_is_written(tmp_path):
    incomplete = record(1)
    del incomplete["loss"], incomplete["entropy"]
    with MetricsWriter(tmp_path) as writer:
        with pytest.raises(ContractError, match="metrics of step 1 lack loss, entropy"):
            writer.write(incomplete)
        assert lines(tmp_path) == []


def test_what_is_no_number_text_list_or_map_is_refused(tmp_path):
    with MetricsWriter(tmp_path) as writer, pytest.raises(ContractError, match="metrics hold a object"):
        writer.write(record(1, thing=object()))


def test_a_step_is_written_once_and_in_order(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(record(1))
        writer.write(record(2))
    with MetricsWriter(tmp_path) as writer:
        assert writer.last_step == 2
        with pytest.raises(ContractError, match="metrics of step 2 come after those of step 2"):
            writer.write(record(2))


def test_truncating_drops_later_steps_and_writing_goes_on(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        for step in range(1, 6):
            writer.write(record(step, loss=1.0))
        assert writer.truncate_after(3) == 2
        assert writer.truncate_after(3) == 0
        writer.write(record(4, loss=2.0))
    steps = read_metrics(tmp_path / "metrics.jsonl")
    assert [(step["step"], step["loss"]) for step in steps] == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0)]
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["metrics.jsonl"]


def test_a_torn_last_line_is_dropped_and_a_damaged_one_elsewhere_is_named(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(record(1))
    path = tmp_path / "metrics.jsonl"
    whole = path.read_text()
    path.write_text(whole + '{"step": 2, "lo')
    with MetricsWriter(tmp_path) as writer:
        assert writer.last_step == 1
        writer.write(record(2))
    assert [step["step"] for step in read_metrics(path)] == [1, 2]
    path.write_text('{"step"\n' + whole)
    with pytest.raises(ContractError, match="line 1 is damaged"):
        read_metrics(path)


def test_tensorboard_shows_every_number_and_forgets_truncated_steps(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(record(1, loss=1.0))
        writer.write(record(2, loss=math.nan))
        writer.write(record(3, loss=3.0))
        writer.truncate_after(1)
        writer.write(record(2, loss=2.0))
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert set(events.Tags()["scalars"]) == {
        *(key for key in REQUIRED_STEP_KEYS if key != "staleness_histogram"),
        "staleness_histogram/0",
        "staleness_histogram/1",
    }
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 1.0), (2, 2.0)]
