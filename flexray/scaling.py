"""How many GPUs a run shall have, asked for while it trains: from Python, or by a file.

The run's folder is what whoever asks and the driver have in common, on a laptop and on a cluster.
"""

from __future__ import annotations

import json
from contextlib import suppress

from flexray.config import ClusterSection
from flexray.errors import UserError
from flexray.run_directory import RunDirectory


def check_scale(cluster: ClusterSection, gpus: int) -> None:
    """Raises UserError for a number of GPUs that the run's config does not allow."""
    least, most, unit = cluster.min_gpus or 1, cluster.max_gpus, cluster.shard_size or 1
    if gpus < least:
        raise UserError(f"{gpus} GPUs: this run goes on with {least} or more (cluster.min_gpus)")
    if most is not None and gpus > most:
        raise UserError(f"{gpus} GPUs: this run may have {most} at most (cluster.max_gpus)")
    if gpus % unit:
        raise UserError(f"{gpus} GPUs: must be a multiple of cluster.shard_size={unit}")


def ask(run: RunDirectory, gpus: int) -> None:
    """Asks the process that trains `run` for `gpus` ranks, in place of an older request."""
    new = run.scale_path.with_suffix(".new")
    new.write_text(json.dumps({"gpus": gpus}))
    new.replace(run.scale_path)


class Scaling:
    """What was asked for and not heard yet."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._asked: int | None = None
        run.scale_path.unlink(missing_ok=True)  # of an earlier process

    def ask(self, gpus: int) -> None:
        """From any thread of this process."""
        self._asked = gpus

    def take(self) -> int | None:
        """The newest request since the last call."""
        asked, self._asked = self._asked, None
        if self._run.scale_path.exists():
            with suppress(ValueError, KeyError, TypeError):
                asked = int(json.loads(self._run.scale_path.read_text())["gpus"])
            self._run.scale_path.unlink(missing_ok=True)
        return asked
