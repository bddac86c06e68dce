"""The FSDP2 trainer: one manifest in, one version more; learner.py says how.

Every rank is given the rows that are its own; the same rows on the same number of ranks give the same bits.
"""

import copy
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from flashflow.algorithms.presets import resolve
from flashflow.algorithms.settings import NO_SHAPING, AdvantageConfig, LossConfig, ShapingConfig
from flashflow.algorithms.surrogates import own_loss
from flashflow.config.sections import CriticSection, FsdpTrainerSection, LoraSection, OptimizerSection
from flashflow.errors import ConfigError, WeightsError
from flashflow.records import Float32Array, Manifest, StagedWeights, Trajectory
from flashflow.trainers import checkpoint, sharding
from flashflow.trainers.backbone import recompute
from flashflow.trainers.base import TrainResult
from flashflow.trainers.batch import check_rows
from flashflow.trainers.critic import Critic
from flashflow.trainers.learner import Learner
from flashflow.trainers.logprobs import TokenScorer
from flashflow.trainers.metrics import UNMEASURED, batch_metrics
from flashflow.trainers.passes import Passes
from flashflow.trainers.share import Hands, Share, deal_rows, whole
from flashflow.trainers.state import Part, describe_parameters, load_state, save_state
from flashflow.trainers.update import Updater
from flashflow.transport.weights.carrier import make_stage

if TYPE_CHECKING:
    from flashflow.config.sections import Config
    from flashflow.trainers.lora import Lora

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
        optimizer_steps: int = 1,
        epochs: int = 1,
        critic: CriticSection | None = None,
        shaping: ShapingConfig = NO_SHAPING,
        lora: LoraSection | None = None,
        seed: int = 0,
        section: FsdpTrainerSection | None = None,
        weights_folder: Path | None = None,
    ) -> None:
        """model: a transformers causal LM on its device, taken over and sharded. num_steps: for the decay of the rate.
        dtype: of the computation and of the staged weights; parameters and optimizer are float32 always.
        optimizer_steps, epochs: of a batch. critic: for estimator gae; None is its defaults, as of section. lora:
        trains adapters in place of the weights, which then are in dtype too. seed: of the adapters.
        weights_folder: where weights are staged as files; None: in shared memory.

        Uses the default process group; makes one of a single rank where there is none. Raises ConfigError on a model
        or an algorithm it does not support.
        """
        if critic is not None and advantage.estimator != "gae":
            raise ConfigError([f"critic: estimator {advantage.estimator} has none; remove it, or use estimator gae"])
        if loss.loss is not None:
            own_loss(loss.loss)  # a mistake shows now, not after the first batch
        self.step = 0
        loss = loss.for_responses(max_response_tokens)
        self._micro_batch_tokens = micro_batch_tokens
        self._section = section if section is not None else FsdpTrainerSection()
        self._device = next(model.parameters()).device
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._owns_group = sharding.start_alone(self._device)
        self._rank = dist.get_rank()
        self._shaping, self._optimizer_steps = shaping, optimizer_steps
        mesh = sharding.make_mesh(self._device)
        # The reference is the model the run starts from, also when a checkpoint is loaded later.
        copied = loss.needs_reference and lora is None
        reference = copy.deepcopy(model).requires_grad_(False) if copied else None
        if advantage.estimator == "gae":
            critic = critic if critic is not None else CriticSection()
        recompute_layers = self._section.activation_checkpointing
        self._critic = (
            Critic(critic, model, num_steps, mesh, self._dtype, activation_checkpointing=recompute_layers)
            if critic is not None
            else None
        )
        self._lora = _adapt(model, lora, seed, self._dtype) if lora is not None else None
        self._scorer = self._sharded(model, temperature, mesh)
        self._updater = Updater(self._scorer, optimizer, num_steps)
        self._learner = Learner(
            scorer=self._scorer,
            updater=self._updater,
            reference=self._reference(reference, temperature, mesh) if loss.needs_reference else None,
            critic=self._critic,
            advantage=advantage,
            loss=loss,
            shaping=shaping,
            optimizer_steps=optimizer_steps,
            epochs=epochs,
        )
        self._weight_stage = make_stage(run_id, weights_folder) if self._rank == 0 else None
        self._settings = {
            "algorithm.advantage": advantage.model_dump_json(),
            "algorithm.loss": loss.model_dump_json(),
            "overlong": shaping.model_dump_json(),
            "optimizer": optimizer.model_dump_json(),
            "critic": "none" if critic is None else critic.model_dump_json(),
            "batch.optimizer_steps x batch.epochs": f"{optimizer_steps} x {epochs}",
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
            optimizer_steps=config.batch.optimizer_steps,
            epochs=config.batch.epochs,
            critic=config.critic,
            shaping=config.shaping,
            lora=config.lora,
            seed=config.run.seed,
            section=config.trainer if isinstance(config.trainer, FsdpTrainerSection) else None,
            weights_folder=config.run_folder / "weights" if config.weights.carrier == "file" else None,
        )

    def rows_of(self, manifest: Manifest) -> Sequence[int]:
        return self._deal(manifest)[self._rank]

    def train(self, manifest: Manifest, rows: list[Trajectory]) -> TrainResult:
        """Raises ContractError when the rows are not this rank's of the next manifest, or a log-probability is NaN;
        BudgetError when too many gradients in a row were not finite."""
        hands = self._deal(manifest)
        check_rows(manifest, rows, hands[self._rank], self.step)
        share = Share([row.num_tokens for row in manifest.rows], hands, self._rank, rows)
        # For whatever a loss of the user's own may draw: the same on every rank, and when the batch is redone.
        torch.manual_seed(manifest.rng_key % 2**63)
        learned = self._learner.learn(self._passes(share), manifest.rows, manifest.step)
        self.step = manifest.step
        unmeasured = UNMEASURED if learned["empty_batch"] else {}
        return TrainResult(step=self.step, metrics={**unmeasured, **learned, **batch_metrics(manifest)})

    def logprobs(self, rows: list[Trajectory]) -> list[Float32Array]:
        """A forward pass of its own under the present weights: [T] each, 0 where not sampled, nats at the sampling
        temperature. Equal to the engine's to the last bit where the engine is `exact`. Every rank scores all rows."""
        passes = self._passes(whole(rows, dist.get_world_size(), self._rank))
        whole_NT = self._learner.logprobs(passes, self._scorer, range(len(rows))).cpu().numpy()
        return [whole_NT[place, : row.num_tokens].copy() for place, row in enumerate(rows)]

    def stage(self, *, fresh: bool = False) -> StagedWeights:
        """Names are those of the unsharded model's named_parameters; of tied parameters the first only. Adapters are
        merged, one weight at a time."""
        lora = self._lora
        parameters = dict(self._scorer.model.named_parameters()) if lora is None else lora.published()
        gather = lora.gather if lora is not None else _gather
        staged: list[StagedWeights | None] = [None]
        if self._weight_stage is not None:
            staged = [self._weight_stage.stage(self.step, parameters, gather=gather, dtype=self._dtype, fresh=fresh)]
        else:
            for name, parameter in parameters.items():
                gather(name, parameter.detach())
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
        save_state(checkpoint.temporary(folder), *self._parts())
        if self._rank == 0:
            checkpoint.finish(folder, self._description())
        dist.barrier()

    def load(self, folder: Path) -> None:
        """Raises ConfigError, before anything changed, when the checkpoint is another model's, or none."""
        found, expected = checkpoint.read_description(folder), self._description()
        mistakes = [
            f"{folder} does not fit {field}: {mistake}"
            for field, one, other in (
                ("model.path", found.parameters, expected.parameters),
                ("the critic", found.critic, expected.critic),
            )
            for mistake in checkpoint.differences(one, other)
        ]
        mistakes += [
            f"{folder} does not fit lora: {mistake}"
            for mistake in checkpoint.adapter_differences(found.adapters, expected.adapters)
        ]
        if mistakes:
            raise ConfigError(mistakes)
        for difference in checkpoint.differences(found.settings, expected.settings):
            logger.warning("resuming with another setting than the checkpoint's: %s", difference)
        load_state(folder, *self._parts())
        self._updater.restore(found.skipped_in_row, found.skipped_total)
        if self._critic is not None:
            self._critic.updater.restore(found.critic_skipped_in_row, found.critic_skipped_total)
        self.step = found.step

    def close(self) -> None:
        if self._weight_stage is not None:
            self._weight_stage.close()
        if self._owns_group and dist.is_initialized():
            dist.destroy_process_group()

    def _sharded(self, model: Any, temperature: float, mesh: DeviceMesh) -> TokenScorer:
        scorer = TokenScorer(model.float(), temperature)
        if self._lora is not None:
            # Frozen weights have their dtype already, and adapters stay float32.
            self._lora.freeze()
        if self._section.activation_checkpointing:
            recompute(scorer.layers)
        sharding.shard(scorer, scorer.layers, mesh, self._dtype if self._lora is None else torch.float32)
        return scorer

    def _reference(self, copied: Any, temperature: float, mesh: DeviceMesh) -> nn.Module:
        """The model the run starts from: a copy, or below adapters the model itself."""
        if self._lora is None:
            return self._sharded(copied, temperature, mesh)
        from flashflow.trainers.lora import BaseScorer

        return BaseScorer(self._scorer, self._lora)

    def _deal(self, manifest: Manifest) -> Hands:
        return deal_rows(manifest.rows, self._shaping, self._optimizer_steps, dist.get_world_size())

    def _passes(self, share: Share) -> Passes:
        whole_during_step = self._section.whole_during_step
        return Passes(share, self.step, self._micro_batch_tokens, self._device, whole_during_step=whole_during_step)

    def _parts(self) -> tuple[Part, Part | None]:
        """What a checkpoint holds: of the policy, of the critic."""
        critic = self._critic
        return (
            (self._scorer.model, self._updater.optimizer),
            None if critic is None else (critic.module, critic.updater.optimizer),
        )

    def _description(self) -> checkpoint.Description:
        critic = self._critic
        return checkpoint.Description(
            step=self.step,
            parameters=describe_parameters(self._scorer.model) if self._lora is None else self._lora.base_parameters,
            settings=self._settings,
            skipped_in_row=self._updater.skipped_in_row,
            skipped_total=self._updater.skipped_total,
            num_ranks=dist.get_world_size(),
            critic={} if critic is None else describe_parameters(critic.module),
            critic_skipped_in_row=0 if critic is None else critic.updater.skipped_in_row,
            critic_skipped_total=0 if critic is None else critic.updater.skipped_total,
            adapters=self._lora.describe() if self._lora is not None else None,
        )


def _adapt(model: Any, section: LoraSection, seed: int, dtype: torch.dtype) -> "Lora":
    # Importing peft takes seconds, which a run without adapters need not wait for.
    from flashflow.trainers.lora import Lora

    return Lora(model, section, seed=seed, dtype=dtype)


def _gather(_: str, parameter: torch.Tensor) -> torch.Tensor:
    return sharding.full(parameter)
