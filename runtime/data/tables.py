"""Texts of Parquet and Arrow files, and tokens of .npy files, a slice at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from cost_models.errors import TitanPlanError
from cost_models.yaml_numbers import cut

from .complaints import reason

if TYPE_CHECKING:
    from .sources import DataFile

_ROWS: Final = 256
_TOKENS: Final = 1 << 20
_MOST_TOKEN: Final = 2**32 - 1
_FILE_MAGIC: Final = b"ARROW1"


def table_texts(file: DataFile, column: str) -> Iterator[str]:
    """The column of each row; null is an empty document.

    Args:
        file: of kind parquet or arrow.
        column: must be there and hold text.

    Raises:
        TitanPlanError: C622, with the row.
    """
    import pyarrow as pa

    row = 0
    try:
        for values in _parquet(file, column) if file.kind == "parquet" else _arrow(file, column):
            for value in values:
                row += 1
                yield value.as_py() or ""
    except (pa.ArrowException, UnicodeDecodeError, OSError) as error:
        if isinstance(error, OSError) and error.errno:  # not of the content: pyarrow's own have no number
            raise
        problem = f"{file.path}: broken after row {row} ({reason(error)})"
        raise TitanPlanError("C622", problem, "write the file again") from None


def _parquet(file: DataFile, column: str) -> Iterator[Any]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(file.path) as table:
        _check_column(table.schema_arrow, file, column)
        for batch in table.iter_batches(_ROWS, columns=[column]):
            yield batch.column(0)


def _arrow(file: DataFile, column: str) -> Iterator[Any]:
    """The stream format, which `save_to_disk` writes, or the file format."""
    import pyarrow as pa

    with pa.memory_map(str(file.path)) as data:
        if data.read(len(_FILE_MAGIC)) == _FILE_MAGIC:
            reader = pa.ipc.open_file(data)
            batches = (reader.get_batch(number) for number in range(reader.num_record_batches))
        else:
            data.seek(0)
            reader = pa.ipc.open_stream(data)
            batches = (batch for batch in reader)
        _check_column(reader.schema, file, column)
        for batch in batches:
            yield batch.column(batch.schema.get_field_index(column))


def _check_column(schema: Any, file: DataFile, column: str) -> None:  # noqa: ANN401 - pyarrow has no types
    import pyarrow as pa

    if schema.get_field_index(column) < 0:
        columns = cut(", ".join(schema.names[:8]) or "none", 200)
        hint = "set training.dataset.text_key to the column of the text"
        raise TitanPlanError("C622", f"{file.path}: no single column {column!r}; columns: {columns}", hint)
    kind = schema.field(column).type
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or str(kind) == "string_view"):
        hint = "set training.dataset.text_key to the column of the text"
        raise TitanPlanError("C622", f"{file.path}: column {column} holds {cut(str(kind), 80)}, not text", hint)


def token_chunks(file: DataFile) -> Iterator[NDArray[np.uint32]]:
    """Tokens of a .npy file as they are: whole numbers in one dimension.

    Raises:
        TitanPlanError: C603, C622.
    """
    try:
        tokens = np.load(file.path, mmap_mode="r", allow_pickle=False)
    except OSError as error:
        raise TitanPlanError("C603", f"{file.path}: cannot be read ({reason(error)})", "check the file") from None
    except (ValueError, EOFError) as error:
        raise TitanPlanError("C622", f"{file.path}: no .npy file ({reason(error)})", "use numpy.save") from None
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        problem = f"{file.path}: {tokens.ndim} dimensions of {tokens.dtype}"
        raise TitanPlanError("C622", problem, "tokens are whole numbers in 1 dimension, documents ended by eos")
    for start in range(0, tokens.size, _TOKENS):
        chunk = tokens[start : start + _TOKENS]
        if chunk.min() < 0 or chunk.max() > _MOST_TOKEN:
            bad = chunk.min() if chunk.min() < 0 else chunk.max()
            raise TitanPlanError("C622", f"{file.path}: {bad} is no token", "tokens are numbers from 0 up")
        yield chunk.astype(np.uint32)
