"""`flashflow eval`: samples of the held-out problems by one model, in this process; a table and their transcripts."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from flashflow import builtin
from flashflow.config import Config
from flashflow.config.sections import TorchEngineSection
from flashflow.errors import ConfigError, RewardError, first_cause
from flashflow.evaluation.sampling import Completion, SamplingPlan, completions
from flashflow.evaluation.summary import Summary, summarise
from flashflow.evaluation.transcripts import Transcript, transcript_file
from flashflow.launch import build
from flashflow.launch.stored_run import find_checkpoint
from flashflow.messages import Message, Score
from flashflow.records import SampleId, Task
from flashflow.roles.env import EVAL_SEED_OFFSET
from flashflow.transport.channel import Peer

if TYPE_CHECKING:
    from flashflow.engines.base import Engine
    from flashflow.roles.env import PromptCodec
    from flashflow.roles.reward import RewardRole

Progress = Callable[[int, int], None]
"""(answers scored, answers in all)."""


class EvalOptions(NamedTuple):
    """What the command line says."""

    checkpoint: str | None = None
    """None: the model itself."""
    samples: int = 1
    temperature: float | None = None
    """None: greedy for one sample, `sampling.temperature` for several."""
    ks: Sequence[int] | None = None
    """None: 1 and `samples`."""
    threshold: float = 1.0
    """Reward from which an answer has solved its problem."""
    output: Path | None = None
    """None: `evaluations/<checkpoint, or "model">.jsonl` in the run folder."""


class Evaluated(NamedTuple):
    summary: Summary
    transcripts: Path


def evaluate(config: Config, options: EvalOptions, note: builtin.Note, progress: Progress) -> Evaluated:
    """Raises ConfigError, before the model is loaded where that is possible; RewardError when the function raises."""
    temperature, ks = _sampling_of(config, options)
    checkpoint = find_checkpoint(config.run_folder, options.checkpoint) if options.checkpoint is not None else None
    name = checkpoint.name if checkpoint is not None else "model"
    output = options.output if options.output is not None else config.run_folder / "evaluations" / f"{name}.jsonl"
    config = builtin.resolve(config, note)
    codec = build.prompt_codec(config)
    limit = config.evaluation.max_new_tokens
    plan = SamplingPlan(
        samples=options.samples,
        temperature=temperature,
        max_new_tokens=limit if limit is not None else config.sampling.max_new_tokens,
        stop_ids=codec.stop_ids,
        stop_strings=config.sampling.stop_strings,
        seed=config.run.seed ^ EVAL_SEED_OFFSET,
    )
    problems = _problems(config, codec)
    _check_lengths(problems, plan.max_new_tokens, config.engine.max_context_tokens)
    session = _Session(_engine(config, checkpoint), build.reward(config, workers=True), codec, problems, plan)
    try:
        with transcript_file(output) as write:
            transcripts = asyncio.run(session.run(write, progress))
    except BaseExceptionGroup as group:
        raise first_cause(group) from group
    return Evaluated(summarise(transcripts, ks, options.threshold), output)


class _Problem(NamedTuple):
    """A held-out problem, ready to be sampled."""

    task: Task
    prompt_ids: list[int]
    shown: str
    """The prompt with its special tokens."""


class _Session:
    """Answers are scored while others are still sampled."""

    def __init__(
        self, engine: "Engine", reward: "RewardRole", codec: "PromptCodec", problems: list[_Problem], plan: SamplingPlan
    ) -> None:
        self._engine = engine
        self._reward = reward
        self._codec = codec
        self._problems = problems
        self._plan = plan

    async def run(self, write: Callable[[Transcript], None], progress: Progress) -> list[Transcript]:
        transcripts: list[Transcript] = []
        total = len(self._problems) * self._plan.samples

        async def score(completion: Completion) -> None:
            transcript = await self._score(completion)
            write(transcript)
            transcripts.append(transcript)
            progress(len(transcripts), total)

        answers = completions(self._engine, [problem.prompt_ids for problem in self._problems], self._plan)
        loop = asyncio.get_running_loop()
        try:
            await self._reward.start()
            # One thread owns the engine; the loop stays free, so that deadlines of the reward mean what they say.
            with ThreadPoolExecutor(1) as thread:
                async with asyncio.TaskGroup() as scoring:
                    while (completion := await loop.run_in_executor(thread, next, answers, None)) is not None:
                        scoring.create_task(score(completion))
        finally:
            await self._reward.close()
        return transcripts

    async def _score(self, completion: Completion) -> Transcript:
        problem = self._problems[completion.problem]
        text = self._codec.decode(completion.token_ids)
        sample = SampleId(completion.problem, completion.sample)
        asked = self._codec.prompt_text(problem.task)
        message = Score(sample=sample, purpose="eval", prompt=asked, completion=text, row=problem.task)
        reply = await self._reward.handle(message, Peer("env", 0, 1), _nothing)
        if reply.error:
            raise RewardError(f"the reward function raised on sample {sample}:\n{reply.error}")
        return Transcript(
            problem=completion.problem,
            sample=completion.sample,
            prompt=problem.shown,
            completion=text,
            reward=reply.reward,
            components=reply.components,
            num_tokens=len(completion.token_ids),
            finish_reason=completion.finish_reason,
            row=problem.task.row,
        )


def _sampling_of(config: Config, options: EvalOptions) -> tuple[float, list[int]]:
    """Temperature and ks. Raises ConfigError with every option that makes no sense."""
    mistakes = []
    samples, temperature = options.samples, options.temperature
    if samples < 1:
        mistakes.append(f"--samples: {samples} must be at least 1")
    if temperature is None:
        temperature = config.sampling.temperature if samples > 1 else 0.0
    if temperature < 0:
        mistakes.append(f"--temperature: {temperature} must be 0 (greedy) or more")
    if temperature == 0 and samples > 1:
        mistakes.append(f"--temperature: 0 makes all of --samples {samples} the same; raise it, or ask for one sample")
    ks = sorted(set(options.ks if options.ks is not None else (1, max(samples, 1))))
    wrong = [k for k in ks if not 1 <= k <= samples]
    if wrong and samples >= 1:
        mistakes.append(f"--k: {', '.join(map(str, wrong))} not in 1 .. --samples {samples}; raise --samples")
    if mistakes:
        raise ConfigError(mistakes)
    return temperature, ks


def _problems(config: Config, codec: "PromptCodec") -> list[_Problem]:
    from flashflow.data.stream import make_stream
    from flashflow.tokenizers import load_tokenizer

    tokenizer = load_tokenizer(config.model.path)
    tasks = make_stream(config.data, config.run.seed).eval_tasks(config.evaluation.problems)
    encoded = [(task, codec.encode(task)) for task in tasks]
    return [_Problem(task, prompt_ids, str(tokenizer.decode(prompt_ids))) for task, prompt_ids in encoded]


def _check_lengths(problems: list[_Problem], max_new_tokens: int, limit: int) -> None:
    lengths = [len(problem.prompt_ids) for problem in problems]
    longest = max(lengths)
    needed = longest + max_new_tokens
    if needed > limit:
        raise ConfigError(
            [f"engine.max_context_tokens: {limit}, but the {longest} tokens of held-out problem "
             f"{lengths.index(longest)} and max_new_tokens {max_new_tokens} need {needed}; raise the first"]
        )  # fmt: skip


def _engine(config: Config, checkpoint: Path | None) -> "Engine":
    """With the weights of the checkpoint, or of the model itself."""
    from flashflow.engines import make_engine
    from flashflow.models import load_model, set_threads
    from flashflow.tokenizers import load_tokenizer
    from flashflow.trainers.weights import load_weights

    set_threads(config.placement.threads)
    model: Any = load_model(config.model.path, config.model.dtype, config.model.device)
    version = load_weights(model, checkpoint) if checkpoint is not None else 0
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    assert isinstance(config.engine, TorchEngineSection)  # open_run refuses simulated ones
    engine = make_engine(config.engine, model, load_tokenizer(config.model.path))
    engine.load(version, weights)
    return engine


async def _nothing(_: Message) -> None:
    """Scores are not streamed."""
