"""Parameters that several routes take, described once for the OpenAPI document."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path, Query

from zombi_platform.events import PARTITION_MAX, TABLE_NAME_PATTERN

# The pattern is only described here: `check_table` enforces it with a code of its own.
TableName = Annotated[
    str,
    Path(description="Name of a table.", json_schema_extra={"pattern": TABLE_NAME_PATTERN}),
]

PartitionNumber = Annotated[
    int, Query(ge=0, le=PARTITION_MAX, description="Number of a partition.")
]
