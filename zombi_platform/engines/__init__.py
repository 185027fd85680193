"""Turn a cut into staged Parquet: Arrow in this process or Spark beside it, one contract."""

from zombi_platform.engines.contract import Engine, SplitResult, StagingJob

__all__ = ["Engine", "SplitResult", "StagingJob"]
