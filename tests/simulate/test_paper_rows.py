"""benchmarks/paper.py: what counts as predicted, fitted or off, and what the documents may excuse."""

import pytest

from benchmarks.paper import Row, listed, scaled, verdict


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (Row("a", "", 100.0, 124.0), "predicted"),
        (Row("a", "", 100.0, 126.0), "OFF"),
        (Row("a", "", 100.0, 74.0), "OFF"),
        (Row("b", "", 100.0, 200.0), "off, docs/simulate.md says why"),
        (Row("a", "", 100.0, 200.0, fitted=True), "fitted"),
        (Row("a", "", None, 200.0), ""),
    ],
)
def test_a_predicted_row_may_be_off_by_a_quarter_or_be_listed(row, says):
    assert verdict(row, excused={"b"}) == says


def test_the_first_row_sets_the_scale():
    first, second = scaled([("x", "", 90.0, 3.0, False), ("y", "", 50.0, 2.0, True)])
    assert (first.ours, first.fitted) == (90.0, True)
    assert (second.ours, second.off, second.secondary) == (60.0, pytest.approx(0.2), True)


def test_the_documents_list_rows_by_their_keys(tmp_path):
    docs = tmp_path / "simulate.md"
    docs.write_text("| row | why |\n|---|---|\n| `queue-0` | because |\ntext `alpha-1` |\n")
    assert listed(docs) == {"queue-0"}
