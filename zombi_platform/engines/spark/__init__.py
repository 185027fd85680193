"""Staging on Spark: the engine and its session here, the task in the executors.

`server` and `daemon` are the warm Spark Connect server of this machine, `zombi spark`.
Only this folder imports pyspark.
"""
