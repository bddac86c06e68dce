import pytest
import torch

from flashflow.config.sections import TorchEngineSection
from flashflow.engines import make_engine
from flashflow.evaluation.sampling import SamplingPlan, completions
from flashflow.models import load_model
from tests.tiny_model import make_tiny_model

PROMPTS = [[5, 9, 30], [7], [100, 101, 102, 103, 104, 105], [5, 9, 31]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def answers(folder, *, slots=8, samples=1, temperature=0.0, seed=0):
    """{(problem, sample): completion}"""
    model = load_model(folder, "float32", "cpu")
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    engine = make_engine(TorchEngineSection(slots=slots, max_context_tokens=64), model)
    engine.load(0, weights)
    plan = SamplingPlan(samples, temperature, max_new_tokens=10, stop_ids=[2], stop_strings=[], seed=seed)
    found = list(completions(engine, PROMPTS, plan))
    assert len({(c.problem, c.sample) for c in found}) == len(found) == len(PROMPTS) * samples
    return {(c.problem, c.sample): c for c in found}


def test_one_greedy_sample_is_the_likeliest_token_each_time(folder):
    model = load_model(folder, "float32", "cpu")
    for (problem, _), completion in answers(folder).items():
        tokens = list(PROMPTS[problem])
        for token in completion.token_ids:
            with torch.no_grad():
                assert int(model(torch.tensor([tokens])).logits[0, -1].argmax()) == token
            tokens.append(token)
        assert completion.finish_reason == ("stop" if tokens[-1] == 2 else "length")
        assert len(completion.token_ids) == 10 or tokens[-1] == 2


def test_samples_of_a_problem_differ_and_do_not_depend_on_who_is_beside_them(folder):
    few, many = (answers(folder, slots=slots, samples=5, temperature=1.0) for slots in (8, 32))
    assert few == many
    for problem in range(len(PROMPTS)):
        assert len({tuple(few[problem, sample].token_ids) for sample in range(5)}) > 1


def test_another_seed_samples_other_answers(folder):
    assert answers(folder, temperature=1.0, seed=0) != answers(folder, temperature=1.0, seed=1)
