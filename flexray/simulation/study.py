"""What one simulation compares: strategies on a cluster, and on smaller and larger ones."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from flexray import __version__
from flexray.errors import UserError
from flexray.simulation.batches import Batches
from flexray.simulation.run import Task
from flexray.simulation.strategies import BASELINE, Case, StepResult, holds
from flexray.simulation.summary import StrategySummary, summarise
from flexray.solver.cluster import Cluster
from flexray.solver.cost import CostModel

# Other cluster sizes, as multiples; they get fewer batches and only the quick strategies.
_FACTORS = (0.25, 0.5, 2, 4)
_SIZE_STEPS = 4
_SIZE_STRATEGIES = (BASELINE, "batch-adaptive", "flexray")


@dataclass(frozen=True)
class Study:
    """The same batches under each strategy.

    Raises:
        UserError: no group of the cluster holds the longest row.
    """

    batches: Batches
    cost: CostModel
    cluster: Cluster
    degrees: tuple[int, ...]
    strategies: tuple[str, ...]

    def __post_init__(self) -> None:
        if not holds(self.cost, self.cluster, self.degrees, self.batches.longest):
            raise UserError(
                f"a row of {self.batches.longest} tokens fits in no group of "
                f"{self.cluster.gpus} GPUs: use more --gpus, allow a larger degree, or give a "
                "smaller --max-length with --over-length drop"
            )

    @cached_property
    def tasks(self) -> list[Task]:
        """All that is to be simulated: the cluster itself first."""
        numbers = range(self.batches.first, self.batches.first + len(self.batches.lengths))
        tasks = self._tasks(self.cluster, numbers, self.strategies)
        for cluster in self._other_sizes:
            tasks += self._tasks(cluster, numbers[:_SIZE_STEPS], self._size_strategies)
        return tasks

    @property
    def steps_of_a_size(self) -> int:
        """Batches that the cluster sizes are compared by."""
        return min(_SIZE_STEPS, len(self.batches.lengths))

    @property
    def settings(self) -> dict[str, Any]:
        """All that the results depend on, as JSON."""
        settings = {
            "gpus": self.cluster.gpus,
            "gpus_per_node": self.cluster.largest_node,
            "batch_size": self.batches.size,
            "first_batch": self.batches.first,
            "steps": len(self.batches.lengths),
            "max_length": self.batches.limit,
            "degrees": self.degrees,
            "strategies": self.strategies,
            "lengths": self.batches.digest,
            "coefficients": asdict(self.cost),
            "version": __version__,
        }
        plain: dict[str, Any] = json.loads(json.dumps(settings))
        return plain

    def steps(self, results: Sequence[StepResult]) -> list[StepResult]:
        """Those of the cluster itself."""
        return [r for r in results if r.gpus == self.cluster.gpus]

    def by_size(self, results: Sequence[StepResult]) -> dict[int, list[StrategySummary]]:
        """GPUs, ascending -> strategies, over the batches that every size was given."""
        if not self._other_sizes:
            return {}
        last = self.batches.first + _SIZE_STEPS
        same = [r for r in results if r.batch < last and r.strategy in self._size_strategies]
        return {
            gpus: summarise([r for r in same if r.gpus == gpus])
            for gpus in sorted({r.gpus for r in same})
        }

    @property
    def _size_strategies(self) -> tuple[str, ...]:
        return tuple(name for name in self.strategies if name in _SIZE_STRATEGIES)

    @cached_property
    def _other_sizes(self) -> list[Cluster]:
        if len(self._size_strategies) < 2:
            return []
        sizes = (self.cluster.gpus * factor for factor in _FACTORS)
        clusters = [
            Cluster.uniform(int(size), self.cluster.largest_node)
            for size in sizes
            if size == int(size)
        ]
        longest = self.batches.longest
        return [c for c in clusters if holds(self.cost, c, self.degrees, longest)]

    def _tasks(
        self, cluster: Cluster, numbers: Sequence[int], strategies: Sequence[str]
    ) -> list[Task]:
        tasks = []
        for number in numbers:
            lengths = tuple(self.batches.lengths[number - self.batches.first].tolist())
            case = Case(number, lengths, self.batches.longest, self.cost, cluster, self.degrees)
            tasks += [(name, case) for name in strategies]
        return tasks
