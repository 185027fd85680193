"""The pipeline as Dagster sees it: partitions, resources, assets, checks, sensors, schedules."""
