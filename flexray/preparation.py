"""What can be checked before a GPU is asked for: the model, the data, the first costs."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace

from transformers import PretrainedConfig

from flexray import estimate
from flexray.actors.lora import Lora, add_adapters
from flexray.actors.loss import TokenLoss, check_token_loss, cross_entropy
from flexray.actors.mesh import check_shard_size
from flexray.actors.model import ModelFactory, ModelRefused, check_model, model_config
from flexray.actors.pool import cluster_of
from flexray.actors.settings import EngineSettings
from flexray.actors.sharding import weight_files
from flexray.actors.worker import Place
from flexray.config import Config
from flexray.data_preparation import check_documents, data_source
from flexray.datasets.data_source import DataSource
from flexray.datasets.mixture import Mixture
from flexray.errors import UserError
from flexray.presets import load_preset
from flexray.solver.cluster import Cluster
from flexray.solver.cost import CostModel
from flexray.solver.degrees import legal_degrees
from flexray.solver.plan import PlanningError
from flexray.solver.planner import plan_step


@dataclass(frozen=True)
class Job:
    """What is to be trained, checked."""

    config: Config
    model: PretrainedConfig  # of the model as it was built
    parameters: int
    trained: int  # of the parameters; the others are frozen
    settings: EngineSettings  # what every actor is told
    data: DataSource
    documents: Mixture  # all rows, those for validation included

    def degrees(self, gpus: int) -> tuple[int, ...]:
        """Legal degrees on `gpus` GPUs that the config allows. Raises PlanningError for none."""
        legal = legal_degrees(self.model.num_attention_heads, self._kv_heads, gpus)
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

    def checked_on(self, places: tuple[Place, ...]) -> tuple[CostModel, tuple[int, ...]]:
        """The costs and degrees that the run starts with on `places`.

        Raises UserError or PlanningError when it cannot run there: what `train` and its dry run
        both refuse.
        """
        cost = self.cost(places)
        self.fewest(cost, places)
        degrees = self.degrees(len(places))
        self.check_communicators(degrees)
        return cost, degrees

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

    def fewest(self, cost: CostModel, places: tuple[Place, ...]) -> int:
        """With how many GPUs the run may go on: the fewest that hold the longest row, or min_gpus.

        What is trained on never depends on membership, so that is decided when the run starts.
        Raises PlanningError where min_gpus, or without it all of `places`, are too few.
        """
        unit = self.config.cluster.shard_size or 1
        given, there = self.config.cluster.min_gpus, len(places)
        if given is None:
            for gpus in range(unit, there, unit):
                with suppress(PlanningError):
                    self._plan_longest(gpus, cost, places)
                    return gpus
        fewest = given or there
        try:
            self._plan_longest(fewest, cost, places)
        except PlanningError as error:
            raise PlanningError(
                f"the longest sequence ({self._longest} tokens) does not fit {fewest} GPUs, the "
                f"fewest that this run may have: {error}; or lower data.max_length"
            ) from None
        return fewest

    def _plan_longest(self, gpus: int, cost: CostModel, places: tuple[Place, ...]) -> None:
        cluster = Cluster.uniform(gpus, cluster_of(places).largest_node)
        plan_step([self._longest], cost, cluster, self.degrees(gpus))

    @property
    def _longest(self) -> int:
        return int(self.documents.lengths.max())

    @property
    def _kv_heads(self) -> int:
        heads = self.model.num_attention_heads
        return int(getattr(self.model, "num_key_value_heads", None) or heads)

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
            kv_heads=self._kv_heads,
            head_size=getattr(model, "head_dim", None) or model.hidden_size // heads,
            value_bytes=compute.itemsize,
            # Master, gradient and two moments.
            state_bytes=4 * master.itemsize * self.trained
            + compute.itemsize * (self.parameters - self.trained),
            activation_checkpointing=self.config.model.activation_checkpointing,
        )


def prepare(
    config: Config, model: ModelFactory | None = None, loss: TokenLoss | None = None
) -> Job:
    """Opens the data and checks the model. Raises UserError, CorpusError or PlanningError.

    Args:
        config: What the run is told.
        model: Makes the model from the configuration of `config.model`, instead of its
            architecture's own class. Actors call it too, so cloudpickle must take it.
        loss: Wide logits [T, V] and labels [T] to each token's loss [T], instead of cross entropy.
    """
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
    hf_config = built.config if model else given
    data = data_source(config.data)
    documents = data.open()
    check_documents(documents, hf_config.vocab_size)
    if config.planner.preset != "auto":
        load_preset(config.planner.preset)
    job = Job(
        config,
        hf_config,
        parameters=sum(p.numel() for p in built.parameters()),
        trained=sum(p.numel() for p in built.parameters() if p.requires_grad),
        settings=settings,
        data=data,
        documents=documents,
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
