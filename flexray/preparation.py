"""What can be checked before a GPU is asked for: the model, the data, the first costs."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from flexray.actors.loss import TokenLoss
from flexray.actors.model import ModelFactory
from flexray.actors.pool import cluster_of
from flexray.actors.worker import Place
from flexray.config import Config
from flexray.data_preparation import check_documents, data_source
from flexray.datasets.data_source import DataSource
from flexray.datasets.mixture import Mixture
from flexray.model_preparation import ModelJob, prepare_model
from flexray.solver.cluster import Cluster
from flexray.solver.cost import CostModel
from flexray.solver.plan import PlanningError
from flexray.solver.planner import plan_step


@dataclass(frozen=True)
class Job(ModelJob):
    """What is to be trained, checked."""

    data: DataSource
    documents: Mixture  # all rows, those for validation included

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

    def longest_share(self, gpus: int) -> int:
        """Tokens of the longest sequence that each of its ranks gets at least, on `gpus`."""
        return -(-self._longest // self.degrees(gpus)[-1])

    def _plan_longest(self, gpus: int, cost: CostModel, places: tuple[Place, ...]) -> None:
        cluster = Cluster.uniform(gpus, cluster_of(places).largest_node)
        plan_step([self._longest], cost, cluster, self.degrees(gpus))

    @property
    def _longest(self) -> int:
        return int(self.documents.lengths.max())


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
    trained = prepare_model(config, model, loss)
    data = data_source(config.data)
    documents = data.open()
    check_documents(documents, trained.model.vocab_size)
    return Job(**vars(trained), data=data, documents=documents)
