"""Sequence lengths from wherever a user has them: a corpus, a table, a list on the command line."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from flexray.errors import UserError

Lengths = npt.NDArray[np.int64]


def read_lengths(source: str) -> Lengths:
    """Lengths in tokens, (rows,).

    Args:
        source: a corpus folder; a Parquet, Arrow, CSV or JSON-lines file with a whole-number
            column `length`; or a comma-separated list.

    Raises:
        UserError: it is none of these, or the column is missing or holds something else.
        CorpusError: a folder that is no sound corpus.
    """
    path = Path(source)
    if path.is_dir():
        # Here, not above: a list on the command line needs no corpus.
        from flexray.datasets.corpus import Corpus

        return Corpus.open(path).lengths.astype(np.int64)
    if path.is_file():
        return _column(path)
    words = [word.strip() for word in source.split(",") if word.strip()]
    if words and all(re.fullmatch(r"[+-]?\d+", word) for word in words):
        numbers = [int(word) for word in words]
        if too_long := [n for n in numbers if abs(n) >= 2**63]:
            raise UserError(f"length {too_long[0]} is not a number of tokens (over 2^63)")
        return np.array(numbers, np.int64)
    raise UserError(
        f"{source}: neither a file, nor a corpus folder, nor a list of lengths like 4000,200,150"
    )


def _column(path: Path) -> Lengths:
    try:
        table = _table(path)
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path}: cannot be read: {' '.join(str(error).split())}") from None
    if "length" not in table.column_names:
        raise UserError(f"{path}: no column `length`; it has {', '.join(table.column_names)}")
    column = table.column("length")
    if not pa.types.is_integer(column.type):
        raise UserError(f"{path}: column `length` holds {column.type}, not whole numbers")
    if column.null_count:
        raise UserError(f"{path}: column `length` has {column.null_count} empty cells")
    try:
        return column.cast(pa.int64()).to_numpy()  # type: ignore[no-any-return]
    except pa.ArrowInvalid:  # uint64
        raise UserError(
            f"{path}: column `length` holds numbers over 2^63: lengths count tokens"
        ) from None


def _table(path: Path) -> pa.Table:
    match path.suffix:
        case ".parquet":
            import pyarrow.parquet

            schema = pyarrow.parquet.read_schema(path)
            columns = ["length"] if "length" in schema.names else None
            return pyarrow.parquet.read_table(path, columns=columns)
        case ".csv":
            import pyarrow.csv

            return pyarrow.csv.read_csv(path)
        case ".jsonl" | ".json" | ".ndjson":
            import pyarrow.json

            return pyarrow.json.read_json(path)
        case ".arrow" | ".feather" | ".ipc":
            with pa.memory_map(str(path)) as file:
                try:
                    return pa.ipc.open_file(file).read_all()
                except pa.ArrowInvalid:
                    file.seek(0)
                    return pa.ipc.open_stream(file).read_all()
    raise UserError(f"{path}: give a .parquet, .arrow, .csv or .jsonl file with a column `length`")
