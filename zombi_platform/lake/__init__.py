"""Iceberg: where tables live, how they are committed to, checked and kept tidy.

`Lake` is what other stages use. Only this folder and `catalog` import pyiceberg; `storage`
and `schema.FILE_SCHEMA` need pyarrow alone, so that Spark's workers can stage with them.
"""
