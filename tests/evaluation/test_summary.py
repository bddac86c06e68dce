import pytest

from flashflow.evaluation.summary import summarise
from flashflow.evaluation.transcripts import Transcript, read_transcripts, transcript_file


def transcript(problem, sample, reward, num_tokens=4, finish_reason="stop"):
    return Transcript(
        problem=problem, sample=sample, prompt="<|im_start|>2 + 2", completion="4", reward=reward, components={},
        num_tokens=num_tokens, finish_reason=finish_reason, row={"prompt": "2 + 2", "answer": "4"},
    )  # fmt: skip


def test_averages_and_pass_at_k_are_means_over_problems():
    rewards = {0: [1.0, 0.0], 1: [0.0, 0.0], 2: [1.0, 1.0], 3: [0.5, None]}
    found = summarise([transcript(p, s, r) for p, rs in rewards.items() for s, r in enumerate(rs)], [1, 2], 1.0)
    values = {estimate.name: estimate.value for estimate in found.estimates}
    # By problem: averages 1/2, 0, 1, 1/4; pass@1 1/2, 0, 1, 0; pass@2 1, 0, 1, 0.
    assert values == pytest.approx({"average": 1.75 / 4, "pass@1": 1.5 / 4, "pass@2": 2 / 4})
    assert list(values) == ["average", "pass@1", "pass@2"]
    assert found.estimates[2].error == pytest.approx((1 / 3 / 4) ** 0.5)  # variance 4 x 1/4 / 3, of 4 problems
    assert (found.num_problems, found.samples, found.num_unscored) == (4, 2, 1)


def test_the_threshold_decides_what_is_solved():
    transcripts = [transcript(0, 0, 0.2), transcript(1, 0, 0.5)]
    assert summarise(transcripts, [1], 1.0).estimates[1].value == 0
    assert summarise(transcripts, [1], 0.5).estimates[1].value == 0.5
    assert summarise(transcripts, [1], 0.2).estimates[1].value == 1


def test_lengths_and_truncation_are_means_over_samples():
    found = summarise([transcript(0, 0, 1.0, 3), transcript(0, 1, 0.0, 9, "length")], [1], 1.0)
    assert (found.mean_response_tokens, found.truncated_share) == (6.0, 0.5)
    assert found.estimates[0].error is None


def test_transcripts_come_back_from_the_file_and_are_there_before_the_end(tmp_path):
    path = tmp_path / "new" / "transcripts.jsonl"
    first, second = transcript(0, 0, None), transcript(0, 1, 1.0)
    with transcript_file(path) as write:
        write(first)
        assert read_transcripts(path) == [first]
        write(second)
    assert read_transcripts(path) == [first, second]
    with transcript_file(path) as write:
        write(second)
    assert read_transcripts(path) == [second]
