"""Spark as a Dagster resource, with a session that outlives its server.

`dagster_pyspark` makes a session once and hands it out for good; after a restart of the
server every use of it fails. Here each use goes through the engine's own connection, which
probes the server and makes a new session when the old one is lost.
"""

from typing import Any

from dagster_pyspark import LazyPySparkResource
from pydantic import Field, PrivateAttr

from zombi_platform.engines.spark.session import Connection
from zombi_platform.settings import Settings


class SparkResource(LazyPySparkResource):
    ship_code: bool = Field(description="Whether the server needs this package sent to it.")
    _connection: Connection | None = PrivateAttr(default=None)

    @classmethod
    def of(cls, settings: Settings) -> "SparkResource":
        connection = Connection.from_settings(settings)
        return cls(spark_config={"spark.remote": connection.remote}, ship_code=connection.ship_code)

    @property
    def connection(self) -> Connection:
        if self._connection is None:
            self._connection = Connection(
                self.spark_config["spark.remote"], ship_code=self.ship_code
            )
        return self._connection

    @property
    def spark_session(self) -> Any:
        return self.connection.session()
