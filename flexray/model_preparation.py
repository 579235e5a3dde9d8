"""What of a run can be checked without its data: the model, and what it costs on which ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace

from transformers import PretrainedConfig

from flexray import estimate
from flexray.actors.lora import Lora, add_adapters
from flexray.actors.loss import TokenLoss, check_token_loss, cross_entropy
from flexray.actors.mesh import check_shard_size
from flexray.actors.model import ModelFactory, ModelRefused, check_model, model_config
from flexray.actors.settings import EngineSettings
from flexray.actors.sharding import weight_files
from flexray.actors.worker import Place
from flexray.config import Config
from flexray.errors import UserError
from flexray.presets import load_preset
from flexray.solver.cost import CostModel
from flexray.solver.degrees import legal_degrees
from flexray.solver.plan import PlanningError


@dataclass(frozen=True)
class ModelJob:
    """A model to be trained, checked, and how."""

    config: Config
    model: PretrainedConfig  # of the model as it was built
    parameters: int
    trained: int  # of the parameters; the others are frozen
    settings: EngineSettings  # what every actor is told

    def degrees(self, gpus: int) -> tuple[int, ...]:
        """Legal degrees on `gpus` GPUs that the config allows. Raises PlanningError for none."""
        legal = legal_degrees(self.model.num_attention_heads, self.kv_heads, gpus)
        allowed = self.config.planner.degrees
        if allowed is None:
            return legal
        chosen = tuple(d for d in legal if d in allowed)
        if not chosen:
            raise PlanningError(
                f"planner.degrees={list(allowed)}: none of them is legal; "
                f"this model on {gpus} GPUs has {list(legal)}"
            )
        return chosen

    def check_device(self, device: str) -> None:
        """Raises UserError for an attention backend that cannot run on `device`."""
        wanted, dtype = self.config.model.attention, self.config.train.dtype
        if wanted not in ("auto", "sdpa") and (device != "cuda" or dtype != "bfloat16"):
            raise UserError(
                f"model.attention={wanted} needs a GPU and train.dtype=bfloat16, and this run has "
                f"{device} and {dtype}: use auto or sdpa"
            )

    def check_communicators(self, degrees: tuple[int, ...]) -> None:
        """Raises UserError when a rank may not hold one communicator of each degree."""
        limit, need = self.config.planner.communicators_per_rank, sum(d > 1 for d in degrees)
        if limit < need:
            raise UserError(
                f"planner.communicators_per_rank={limit} is less than the {need} degrees above 1 "
                f"({list(degrees)}): raise it or limit planner.degrees"
            )

    def cost(self, places: tuple[Place, ...]) -> CostModel:
        """The cost model that the run starts with: a preset's, or estimated from shapes.

        Raises UserError when cluster.shard_size does not divide the ranks.
        """
        planner, shard_size = self.config.planner, self.config.cluster.shard_size
        try:
            check_shard_size(shard_size, len(places))
        except ModelRefused as error:
            raise UserError(str(error)) from None
        if planner.preset == "auto":
            communicators = planner.communicators_per_rank
            cost = estimate.estimate_cost(
                self._shape, _slowest(places), len(places), communicators, shard_size
            )
        else:
            cost = replace(load_preset(planner.preset).cost, shard_size=shard_size)
        return cost if planner.capacity is None else cost.with_capacity(planner.capacity)

    @property
    def kv_heads(self) -> int:
        """Key/value heads: as many as query heads where the model does not say."""
        heads = self.model.num_attention_heads
        return int(getattr(self.model, "num_key_value_heads", None) or heads)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that is admitted and that the model has positions for."""
        positions = getattr(self.model, "max_position_embeddings", None)
        return min(self.config.data.max_length, positions or self.config.data.max_length)

    @property
    def _shape(self) -> estimate.Shape:
        model, heads = self.model, self.model.num_attention_heads
        master, compute = self.settings.master_dtype, self.settings.compute_dtype
        return estimate.Shape(
            parameters=self.parameters,
            trained=self.trained,
            layers=model.num_hidden_layers,
            hidden=model.hidden_size,
            intermediate=getattr(model, "intermediate_size", None) or 4 * model.hidden_size,
            heads=heads,
            kv_heads=self.kv_heads,
            head_size=getattr(model, "head_dim", None) or model.hidden_size // heads,
            value_bytes=compute.itemsize,
            # Master, gradient and two moments.
            state_bytes=4 * master.itemsize * self.trained
            + compute.itemsize * (self.parameters - self.trained),
            activation_checkpointing=self.config.model.activation_checkpointing,
        )


def prepare_model(
    config: Config, model: ModelFactory | None = None, loss: TokenLoss | None = None
) -> ModelJob:
    """Checks the model and the settings; arguments as of `prepare`. Raises UserError."""
    try:
        given = model_config(config.model.config, config.model.path)
        if config.model.path is not None:
            weight_files(config.model.path)
        built = check_model(given, model)
        check_token_loss(loss or cross_entropy, built.config.vocab_size)
        settings = _settings(config, given, model, loss)
        if settings.lora:
            add_adapters(built, settings.lora, master=settings.master_dtype)
    except ModelRefused as error:
        raise UserError(str(error)) from None
    if config.planner.preset != "auto":
        load_preset(config.planner.preset)
    hf_config = built.config if model else given
    job = ModelJob(
        config,
        hf_config,
        parameters=sum(p.numel() for p in built.parameters()),
        trained=sum(p.numel() for p in built.parameters() if p.requires_grad),
        settings=settings,
    )
    job.degrees(hf_config.num_attention_heads)  # allowed ones that no cluster makes legal
    return job


def _settings(
    config: Config, model: PretrainedConfig, factory: ModelFactory | None, loss: TokenLoss | None
) -> EngineSettings:
    train = config.train
    return EngineSettings(
        model=model,
        model_factory=factory,
        token_loss=loss or cross_entropy,
        # Actors have working directories of their own.
        weights=path.absolute() if (path := config.model.path) else None,
        lora=Lora(**lora.model_dump()) if (lora := config.model.lora) else None,
        shard_size=config.cluster.shard_size,
        dtype=train.dtype,
        seed=train.seed,
        attention=config.model.attention,
        activation_checkpointing=config.model.activation_checkpointing,
        loss_chunk=config.model.loss_chunk,
        learning_rate=train.learning_rate,
        schedule=train.schedule,
        warmup_steps=train.warmup_steps,
        min_learning_rate=train.min_learning_rate,
        steps=train.steps,
        betas=train.betas,
        weight_decay=train.weight_decay,
        clip_norm=train.clip_norm,
    )


def _slowest(places: tuple[Place, ...]) -> estimate.Device:
    """The device that the estimate is for: the one with the least memory."""
    place = min(places, key=lambda p: p.memory_mb)
    if place.device_name:
        return estimate.gpu(place.device_name, place.memory_mb)
    neighbours = sum(p.node == place.node for p in places)
    return estimate.cpu(place.cores, neighbours, place.memory_mb)
