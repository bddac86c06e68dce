import random
from itertools import islice
from pathlib import Path

import msgspec
import pytest
import torch
import yaml
from transformers import PreTrainedTokenizerFast
from transformers.models.qwen3 import Qwen3ForCausalLM

from flashflow.config.sections import Config
from flashflow.data.chat import render_prompt
from flashflow.data.split import is_held_out
from flashflow.data.stream import make_stream
from flashflow.quickstart import MODEL_NAME, ensure_model
from flashflow.quickstart.recipe import Recipe, cached_folder
from flashflow.quickstart.task import demonstration, exact_answer, guess, training_problems, worked
from flashflow.quickstart.tokenizer import make_tokenizer
from flashflow.quickstart.warm_start import Example, collate, completion_loss, examples, make_model, untrained_model

CONFIG = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
SHORT = Recipe(steps=3, batch=4)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer(Recipe())


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cache") / "model"
    make_model(folder, SHORT, seed=0)
    return folder


# ---- the task


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("47 + 85", "7+5=12, 4+8+1=13 <answer>132</answer>"),
        ("12 + 34", "2+4=6, 1+3+0=4 <answer>46</answer>"),
        ("85 - 47", "15-7=8, 8-4-1=3 <answer>38</answer>"),
        ("55 - 85", "negative: 5-5=0, 8-5-0=3 <answer>-30</answer>"),
        ("40 - 40", "0-0=0, 4-4-0=0 <answer>0</answer>"),
        ("99 + 9", "9+9=18, 9+0+1=10 <answer>108</answer>"),
    ],
)
def test_a_sum_is_worked_column_by_column(expression, text):
    assert worked(expression) == text


def test_every_worked_sum_is_right():
    for x in range(0, 130, 7):
        for y in range(0, 130, 3):
            assert exact_answer(worked(f"{x} + {y}"), str(x + y)) == 1.0
            assert exact_answer(worked(f"{x} - {y}"), str(x - y)) == 1.0


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("7+5=12 <answer>132</answer>", 1.0),
        ("<answer> 132\n</answer>", 1.0),
        ("<answer>7</answer> no: <answer>132</answer>", 1.0),
        ("<answer>132</answer> no: <answer>7</answer>", 0.0),
        ("<answer>1320</answer>", 0.0),
        ("<answer>it is 132</answer>", 0.0),
        ("<answer>132.0</answer>", 0.0),
        ("132", 0.0),
        ("<answer>132", 0.0),
        ("", 0.0),
    ],
)
def test_only_the_exact_answer_is_rewarded(completion, reward):
    assert exact_answer(completion, "132", metadata={}) == reward


def test_a_guess_is_at_most_fifteen_off():
    rng = random.Random(0)
    off = {int(guess(100, rng).removeprefix("<answer>").removesuffix("</answer>")) - 100 for _ in range(2_000)}
    assert off == set(range(-15, 16))


def test_guesses_have_the_share_of_the_recipe():
    problem = {"answer": "3", "metadata": {"expression": "1 + 2"}}
    rng = random.Random(0)
    shown = [demonstration(problem, 0.6, rng) for _ in range(4_000)]
    share = sum(text.startswith("<answer>") for text in shown) / len(shown)
    assert share == pytest.approx(0.6, abs=0.03)  # four standard errors
    assert Recipe().guess_probability(559) == 0.1
    assert Recipe().guess_probability(560) == 0.6


def test_the_learning_rate_rises_then_falls_in_a_line_to_a_tenth():
    recipe = Recipe(lr=1.0, warmup_steps=20, steps=700)
    assert recipe.learning_rate(0) == 1 / 20
    assert recipe.learning_rate(350) == pytest.approx(0.55)
    assert recipe.learning_rate(700) == pytest.approx(0.1)


# ---- what the model sees


def test_the_warm_start_sees_no_problem_that_is_held_out(tokenizer):
    config = Config.model_validate(yaml.safe_load(CONFIG.read_text()))
    held_out = [task.row["prompt"] for task in make_stream(config.data, seed=0).eval_tasks(config.evaluation.problems)]
    forbidden = {tuple(render_prompt(tokenizer, prompt, None)) for prompt in held_out}
    seen = {tuple(example.prompt) for step in examples(Recipe(steps=100), tokenizer, seed=0) for example in step}
    assert len(forbidden) == 512
    assert len(seen) > 2_000
    assert not seen & forbidden


def test_models_of_different_seeds_are_shown_different_problems():
    first, second = ({p["question"] for p in islice(training_problems(Recipe(), seed), 50)} for seed in (0, 1))
    assert len(first & second) < 5
    assert not any(is_held_out(question) for question in first | second)


def test_digits_are_tokens_of_their_own_and_every_prompt_is_equally_long(tokenizer):
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("132")) == ["1", "3", "2"]
    lengths = {len(e.prompt) for step in examples(SHORT, tokenizer, seed=0) for e in step}
    assert lengths == {26}


def test_the_tokenizer_reads_back_what_it_wrote(tokenizer):
    for text in (worked("55 - 85"), "State: é\n<answer>-7</answer>"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


# ---- training


def test_the_loss_is_the_mean_over_completion_tokens_only(tokenizer):
    torch.manual_seed(0)
    model = untrained_model(Recipe(), tokenizer)
    batch = [Example([5, 6, 7], [8, 9]), Example([5, 6], [10, 11, 12, 13])]
    expected = []
    for prompt, completion in batch:
        ids = torch.tensor([prompt + completion])
        logprobs = model(input_ids=ids).logits[0].log_softmax(-1)
        expected += [-logprobs[len(prompt) + i - 1, token] for i, token in enumerate(completion)]
    loss = completion_loss(model, collate(batch, pad=0))
    torch.testing.assert_close(loss, torch.stack(expected).mean())


def test_the_saved_folder_loads_as_any_hugging_face_model(model_folder, tokenizer):
    model = Qwen3ForCausalLM.from_pretrained(model_folder)
    loaded = PreTrainedTokenizerFast.from_pretrained(model_folder)
    assert sum(parameter.numel() for parameter in model.parameters()) == 168_832
    assert model.config.tie_word_embeddings
    assert model.dtype == torch.float32
    assert len(loaded) == model.config.vocab_size == 324
    assert model.generation_config.eos_token_id == loaded.eos_token_id == 2
    assert render_prompt(loaded, "1 + 1", None) == render_prompt(tokenizer, "1 + 1", None)
    assert loaded.decode(loaded.encode("hi<|im_end|>"), skip_special_tokens=True) == "hi"


def test_the_same_seed_makes_the_same_model(model_folder, tmp_path):
    state = torch.random.get_rng_state()
    make_model(tmp_path / "again", SHORT, seed=0)
    make_model(tmp_path / "other", SHORT, seed=1)
    assert torch.equal(torch.random.get_rng_state(), state)
    same, again, other = (
        (folder / "model.safetensors").read_bytes() for folder in (model_folder, tmp_path / "again", tmp_path / "other")
    )
    assert same == again
    assert same != other


def test_training_lowers_the_loss_and_reports_it(tmp_path):
    reports = []
    make_model(tmp_path / "m", Recipe(steps=30, batch=8), seed=0, progress=lambda *report: reports.append(report))
    assert [report[:2] for report in reports] == [(25, 30), (30, 30)]
    assert reports[-1][2] < 4.0  # ln(324) = 5.8 nats before training


def test_a_made_folder_is_whole_and_leaves_nothing_beside_it(model_folder):
    assert [path.name for path in model_folder.parent.iterdir()] == ["model"]
    before = (model_folder / "model.safetensors").stat().st_mtime_ns
    make_model(model_folder, Recipe(steps=1, batch=2), seed=5)
    assert [path.name for path in model_folder.parent.iterdir()] == ["model"]
    assert (model_folder / "model.safetensors").stat().st_mtime_ns == before


def test_a_cached_model_is_not_made_again(tmp_path):
    folder = cached_folder(tmp_path, Recipe(), 7)
    folder.mkdir(parents=True)
    assert ensure_model(tmp_path, 7) == folder
    assert list(folder.iterdir()) == []


def test_another_seed_or_recipe_is_another_folder(tmp_path):
    changed = msgspec.structs.replace(Recipe(), lr=1e-3)
    folders = [cached_folder(tmp_path, *of) for of in ((Recipe(), 0), (Recipe(), 1), (changed, 0))]
    assert len(set(folders)) == 3


def test_the_shipped_config_is_the_quickstarts():
    config = Config.model_validate(yaml.safe_load(CONFIG.read_text()))
    assert config.model.path == MODEL_NAME
    assert config.data.source.options == Recipe().options
    assert config.data.source.task == Recipe().task
    assert 26 + config.sampling.max_new_tokens <= config.engine.max_context_tokens
