"""Measures what an event costs, from the request to Iceberg; run it with `make bench`.

The figure that counts is server CPU-seconds per million events: unlike events per second it
hardly depends on the machine's other load. Nothing here is shipped with the package.
"""
