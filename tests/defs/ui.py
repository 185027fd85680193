"""Dagster's GraphQL API, as its UI calls it."""

from __future__ import annotations

from typing import Any

import httpx

from tests.platform import wait_until

LAUNCH = """mutation($params: ExecutionParams!) {
  launchRun(executionParams: $params) {
    __typename
    ... on LaunchRunSuccess { run { runId } }
    ... on PythonError { message }
  } }"""
RE_EXECUTE = """mutation($params: ReexecutionParams!) {
  launchRunReexecution(reexecutionParams: $params) {
    __typename
    ... on LaunchRunSuccess { run { runId } }
    ... on PythonError { message }
  } }"""
BACKFILL = """mutation($params: LaunchBackfillParams!) {
  launchPartitionBackfill(backfillParams: $params) {
    __typename
    ... on LaunchBackfillSuccess { backfillId }
    ... on PythonError { message }
  } }"""
TERMINATE = """mutation($id: String!) { terminateRun(runId: $id) {
  __typename ... on TerminateRunFailure { message } } }"""
RUN = """query($id: ID!) { runOrError(runId: $id) { ... on Run {
  runId status jobName tags { key value } stats { ... on RunStatsSnapshot { stepsFailed } }
  stepStats { stepKey status startTime endTime attempts { startTime } }
  creationTime startTime endTime } } }"""
RUNS = """query($filter: RunsFilter!) { runsOrError(filter: $filter, limit: 500) {
  ... on Runs { results { runId status jobName tags { key value } } } } }"""
BACKFILL_STATUS = """query($id: String!) { partitionBackfillOrError(backfillId: $id) {
  ... on PartitionBackfill { status numPartitions } } }"""
ASSET = """query($key: AssetKeyInput!) { assetNodeOrError(assetKey: $key) { ... on AssetNode {
  partitionStats { numMaterialized numFailed numPartitions }
  assetChecksOrError { ... on AssetChecks { checks { name blocking
    executionForLatestMaterialization { status evaluation { success } } } } } } } }"""

QUERIED_EVERY_SECS = 0.5
"""A query costs the webserver what a small flush costs; the tests share its machine."""

DONE = {"SUCCESS", "FAILURE", "CANCELED"}
SELECTOR = {"repositoryLocationName": "zombi", "repositoryName": "__repository__"}


class Ui:
    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=60)

    def query(self, text: str, **variables: Any) -> dict[str, Any]:
        answer = self._http.post("/graphql", json={"query": text, "variables": variables})
        body = answer.json()
        assert "errors" not in body, body
        data: dict[str, Any] = body["data"]
        return data

    def launch(self, job: str, table: str | None = None) -> str:
        tags = [] if table is None else [{"key": "dagster/partition", "value": table}]
        params = {
            "selector": {**SELECTOR, "jobName": job},
            "executionMetadata": {"tags": tags},
            "runConfigData": {},
        }
        return self._run_id(self.query(LAUNCH, params=params)["launchRun"])

    def re_execute(self, run_id: str) -> str:
        """From the failed step on."""
        params = {"parentRunId": run_id, "strategy": "FROM_FAILURE"}
        return self._run_id(self.query(RE_EXECUTE, params=params)["launchRunReexecution"])

    def backfill(self, asset: str, keys: list[str]) -> str:
        params = {"assetSelection": [{"path": [asset]}], "partitionNames": keys}
        answer = self.query(BACKFILL, params=params)["launchPartitionBackfill"]
        assert answer["__typename"] == "LaunchBackfillSuccess", answer
        return str(answer["backfillId"])

    def terminate(self, run_id: str) -> None:
        answer = self.query(TERMINATE, id=run_id)["terminateRun"]
        assert answer["__typename"] == "TerminateRunSuccess", answer

    def run(self, run_id: str) -> dict[str, Any]:
        found: dict[str, Any] = self.query(RUN, id=run_id)["runOrError"]
        return found

    def runs(self, **filters: Any) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.query(RUNS, filter=filters)["runsOrError"]["results"]
        return found

    def wait(self, run_id: str) -> dict[str, Any]:
        ended = f"run {run_id} has ended"
        wait_until(lambda: self.run(run_id)["status"] in DONE, ended, every_secs=QUERIED_EVERY_SECS)
        return self.run(run_id)

    def asset(self, key: str) -> dict[str, Any]:
        found: dict[str, Any] = self.query(ASSET, key={"path": [key]})["assetNodeOrError"]
        return found

    def backfill_status(self, backfill_id: str) -> str:
        found = self.query(BACKFILL_STATUS, id=backfill_id)["partitionBackfillOrError"]
        return str(found["status"])

    def close(self) -> None:
        self._http.close()

    @staticmethod
    def _run_id(answer: dict[str, Any]) -> str:
        assert answer["__typename"] == "LaunchRunSuccess", answer
        return str(answer["run"]["runId"])
