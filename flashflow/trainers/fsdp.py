"""The FSDP2 trainer: one manifest in, one optimizer step, one version more.

    rows -> advantages, denominators (whole batch) -> micro-batches: forward, loss, backward -> AdamW -> stage()

Every rank is given all rows and takes its share of the micro-batches; the same rows give the same bits.
"""

import copy
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from flashflow.algorithms.presets import resolve
from flashflow.algorithms.settings import NO_SHAPING, AdvantageConfig, LossConfig, ShapingConfig
from flashflow.algorithms.stats import summarise
from flashflow.config.sections import OptimizerSection
from flashflow.errors import ConfigError, WeightsError
from flashflow.records import Float32Array, Manifest, SharedWeights, Trajectory
from flashflow.trainers import checkpoint, sharding
from flashflow.trainers.base import TrainResult
from flashflow.trainers.batch import check_rows, consume
from flashflow.trainers.logprobs import TokenScorer
from flashflow.trainers.metrics import UNMEASURED, batch_metrics, packing_metrics
from flashflow.trainers.passes import Passes
from flashflow.trainers.state import describe_parameters, load_state, save_state
from flashflow.trainers.update import Updater
from flashflow.transport.weights.shared_memory import WeightStage

if TYPE_CHECKING:
    from flashflow.config.sections import Config

logger = logging.getLogger(__name__)


class FsdpTrainer:
    """Implements `Trainer`."""

    def __init__(
        self,
        model: Any,
        *,
        run_id: str,
        advantage: AdvantageConfig,
        loss: LossConfig,
        optimizer: OptimizerSection,
        num_steps: int,
        micro_batch_tokens: int,
        temperature: float,
        max_response_tokens: int,
        dtype: Literal["float32", "bfloat16"] = "float32",
        shaping: ShapingConfig = NO_SHAPING,
    ) -> None:
        """model: a transformers causal LM on its device, taken over and sharded. num_steps: for the decay of the rate.
        dtype: of the computation and of the staged weights; parameters and optimizer are float32 always.

        Uses the default process group; makes one of a single rank where there is none. Raises ConfigError on a model
        or an algorithm it does not support.
        """
        if advantage.estimator == "gae":
            raise ConfigError(
                ["algorithm.estimator: gae needs a critic, which the fsdp trainer has not; use grpo, say"]
            )
        self.step = 0
        self._advantage, self._loss = advantage, loss.for_responses(max_response_tokens)
        self._shaping = shaping
        self._micro_batch_tokens = micro_batch_tokens
        self._device = next(model.parameters()).device
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._owns_group = sharding.start_alone(self._device)
        self._rank = dist.get_rank()
        mesh = sharding.make_mesh(self._device)
        # The reference is the model the run starts from, also when a checkpoint is loaded later.
        reference = copy.deepcopy(model).requires_grad_(False) if loss.needs_reference else None
        self._reference = self._sharded(reference, temperature, mesh) if reference is not None else None
        self._scorer = self._sharded(model, temperature, mesh)
        self._updater = Updater(self._scorer, optimizer, num_steps)
        self._weight_stage = WeightStage(run_id) if self._rank == 0 else None
        self._settings = {
            "algorithm.advantage": advantage.model_dump_json(),
            "algorithm.loss": self._loss.model_dump_json(),
            "overlong": shaping.model_dump_json(),
            "optimizer": optimizer.model_dump_json(),
            "sampling.temperature": str(temperature),
        }

    @classmethod
    def from_config(cls, config: "Config", model: Any, *, run_id: str) -> "FsdpTrainer":
        overrides = config.algorithm.model_extra
        advantage, loss = resolve(
            config.algorithm.preset, overrides if overrides is not None else {}, alpha=config.trained_staleness
        )
        return cls(
            model,
            run_id=run_id,
            advantage=advantage,
            loss=loss,
            optimizer=config.optimizer,
            num_steps=config.run.steps,
            micro_batch_tokens=config.batch.micro_batch_tokens,
            temperature=config.sampling.temperature,
            max_response_tokens=config.sampling.max_new_tokens,
            dtype=config.model.dtype,
            shaping=config.shaping,
        )

    def train(self, manifest: Manifest, rows: list[Trajectory]) -> TrainResult:
        """One optimizer step. Raises ContractError when the rows are not those of the next manifest, or a
        log-probability is NaN; BudgetError when too many gradients in a row were not finite."""
        check_rows(manifest, rows, self.step)
        # For whatever a loss of the user's own may draw: the same on every rank, and when the batch is redone.
        torch.manual_seed(manifest.rng_key % 2**63)
        passes = self._passes(rows)
        reference_NT = passes.score(self._reference, range(len(rows))) if self._reference is not None else None
        consumed = consume(rows, self._advantage, self._loss, reference_NT, self._shaping)
        outcome = passes.train(self._scorer, self._loss, consumed, reference_NT)
        gradient_norm, rate = self._updater.apply(manifest.step)
        self.step = manifest.step
        metrics = {
            **(UNMEASURED if consumed.num_tokens == 0 else {}),
            **summarise(outcome.metrics),
            **batch_metrics(manifest, rows),
            **packing_metrics(outcome.plan, rows),
            "loss": outcome.loss,
            "grad_norm": gradient_norm,
            "learning_rate": rate,
            "tokens_trained": float(consumed.num_tokens),
            "empty_batch": float(consumed.num_tokens == 0),
            "skipped_steps": float(self._updater.skipped_total),
        }
        return TrainResult(step=self.step, metrics=metrics)

    def logprobs(self, rows: list[Trajectory]) -> list[Float32Array]:
        """A forward pass of its own under the present weights: [T] each, 0 where not sampled, nats at the sampling
        temperature. Equal to the engine's to the last bit where the engine is `exact`."""
        whole_NT = self._passes(rows).score(self._scorer, range(len(rows))).cpu().numpy()
        return [whole_NT[place, : row.num_tokens].copy() for place, row in enumerate(rows)]

    def stage(self) -> SharedWeights:
        """Names are those of the unsharded model's named_parameters; of tied parameters the first only."""
        parameters = dict(self._scorer.model.named_parameters())
        staged: list[SharedWeights | None] = [None]
        if self._weight_stage is not None:
            staged = [self._weight_stage.stage(self.step, parameters, gather=sharding.full, dtype=self._dtype)]
        else:
            for parameter in parameters.values():
                sharding.full(parameter.detach())
        if dist.get_world_size() > 1:
            dist.broadcast_object_list(staged, src=0)
        if staged[0] is None:
            raise WeightsError(f"rank 0 staged nothing for version {self.step}")
        return staged[0]

    def save(self, folder: Path) -> None:
        """Collective; complete once it returns, on every rank."""
        if self._rank == 0:
            checkpoint.begin(folder)
        dist.barrier()
        save_state(checkpoint.temporary(folder), self._scorer.model, self._updater.optimizer)
        if self._rank == 0:
            checkpoint.finish(folder, self._description())
        dist.barrier()

    def load(self, folder: Path) -> None:
        """Raises ConfigError, before anything changed, when the checkpoint is another model's, or none."""
        found, expected = checkpoint.read_description(folder), self._description()
        mistakes = checkpoint.differences(found.parameters, expected.parameters)
        if mistakes:
            raise ConfigError([f"{folder} does not fit model.path: {mistake}" for mistake in mistakes])
        for difference in checkpoint.differences(found.settings, expected.settings):
            logger.warning("resuming with another setting than the checkpoint's: %s", difference)
        load_state(folder, self._scorer.model, self._updater.optimizer)
        self._updater.restore(found.skipped_in_row, found.skipped_total)
        self.step = found.step

    def close(self) -> None:
        if self._weight_stage is not None:
            self._weight_stage.close()
        if self._owns_group and dist.is_initialized():
            dist.destroy_process_group()

    def _sharded(self, model: Any, temperature: float, mesh: DeviceMesh) -> TokenScorer:
        scorer = TokenScorer(model.float(), temperature)
        sharding.shard(scorer, scorer.layers, mesh, self._dtype)
        return scorer

    def _passes(self, rows: list[Trajectory]) -> Passes:
        return Passes(rows, self.step, self._micro_batch_tokens, self._device)

    def _description(self) -> checkpoint.Description:
        return checkpoint.Description(
            step=self.step,
            parameters=describe_parameters(self._scorer.model),
            settings=self._settings,
            skipped_in_row=self._updater.skipped_in_row,
            skipped_total=self._updater.skipped_total,
            num_ranks=dist.get_world_size(),
        )
