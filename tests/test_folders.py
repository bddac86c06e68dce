import stat

import pytest

from flashflow.folders import whole_folder


def test_a_folder_gets_its_name_only_when_it_is_filled(tmp_path):
    with whole_folder(tmp_path / "deep" / "model") as partial:
        (partial / "weights").write_text("all")
        assert not (tmp_path / "deep" / "model").exists()
    assert (tmp_path / "deep" / "model" / "weights").read_text() == "all"
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["model"]


def test_a_failure_leaves_nothing(tmp_path):
    def fail():
        with whole_folder(tmp_path / "model") as partial:
            (partial / "weights").write_text("half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_whoever_comes_second_keeps_the_firsts(tmp_path):
    with whole_folder(tmp_path / "model") as second:
        (second / "weights").write_text("second")
        with whole_folder(tmp_path / "model") as first:
            (first / "weights").write_text("first")
    assert (tmp_path / "model" / "weights").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_an_empty_folder_is_filled_and_others_may_read_it_as_any(tmp_path):
    (tmp_path / "plain").mkdir()
    (tmp_path / "model").mkdir()
    with whole_folder(tmp_path / "model") as partial:
        (partial / "weights").write_text("all")
    assert (tmp_path / "model" / "weights").exists()
    modes = {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("plain", "model")}
    assert len(modes) == 1
