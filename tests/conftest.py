"""Fixtures that tests of several stages share; each lives beside the server it starts."""

from __future__ import annotations

from tests.rest import rest_classpath, rest_server
from tests.s3 import credentials, moto, versitygw
from tests.spark import spark_server

__all__ = ["credentials", "moto", "rest_classpath", "rest_server", "spark_server", "versitygw"]
