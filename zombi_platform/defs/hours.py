"""What each hour of a table holds, read from the lake.

Commits report the hours they touch without a run. Running the asset reads the hour again,
which says what is there now, whoever wrote it.
"""

from datetime import datetime
from typing import Final

import dagster as dg

from zombi_platform.defs.describing import Metadata, describe_sample
from zombi_platform.defs.flush import EVENTS, OWNERS, snapshot
from zombi_platform.defs.partitions import hour_of, table_hours
from zombi_platform.defs.worker import RETRIES, as_dagster_wants
from zombi_platform.errors import ZombiError
from zombi_platform.lake.hours import read_hour
from zombi_platform.lake.lake import Lake

GROUP: Final = "hours"
HOURS_PER_RUN_MAX: Final = 24
"""A backfill of more is several runs."""


def make_events(now: datetime) -> dg.AssetsDefinition:
    @dg.asset(
        key=EVENTS,
        deps=[snapshot],
        partitions_def=table_hours(now),
        backfill_policy=dg.BackfillPolicy.multi_run(HOURS_PER_RUN_MAX),
        description="Events of one UTC hour of a table, as they are in the lake. Every commit "
        "reports the hours it touched; running it counts the rows again and shows some.",
        group_name=GROUP,
        owners=OWNERS,
        kinds={"iceberg"},
        retry_policy=RETRIES,
    )
    def events(
        context: dg.AssetExecutionContext, lake: dg.ResourceParam[Lake]
    ) -> dg.MaterializeResult[None]:
        for key in context.partition_keys:
            assert isinstance(key, dg.MultiPartitionKey)
            place = key.keys_by_dimension
            metadata = describe_hour(lake, place["table"], hour_of(place["hour"]))
            context.add_asset_metadata(metadata, partition_key=key)
        return dg.MaterializeResult()

    return events


def describe_hour(lake: Lake, table: str, hour: int) -> Metadata:
    try:
        found = read_hour(lake, table, hour)
    except ZombiError as error:
        raise as_dagster_wants(error) from error
    return {
        "events": found.events,
        "dagster/partition_row_count": found.events,
        "bytes": found.bytes,
        "files": found.files,
        "snapshot_id": str(found.snapshot_id),
        "sample": describe_sample(found.sample),
    }
