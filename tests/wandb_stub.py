"""A W&B server for tests, on the loopback interface: runs, their rows, artifacts up to the file.

It answers what the client of wandb 0.31 asks and keeps what it sends; it can be killed and started
again at the same port, with its memory.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class StubServer:
    """What the runs of one test sent."""

    def __init__(self) -> None:
        self.history: dict[str, dict[int, dict[str, Any]]] = {}
        """By run: rows by their place in the stream; a row that is sent again takes its place."""
        self.received: list[tuple[str, dict[str, Any]]] = []
        """Run and row, as they came, also twice."""
        self.operations: list[str] = []
        self.alerts: list[dict[str, Any]] = []
        self.artifacts: list[dict[str, Any]] = []
        self.configs: dict[str, str] = {}
        """By run, as JSON."""
        self.file: bytes | None = None
        """The packed trace of the artifact that runs have; None: they have none."""
        self.states: dict[str, str] = {}
        """By run, where it is not finished."""
        self.refuse: int | None = None
        """An HTTP status to answer everything with."""
        self._server: ThreadingHTTPServer | None = None
        self._port = 0
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Listen, at the port from before if there was one."""
        stub = self

        class Handler(_Handler):
            server_stub = stub

        self._server = ThreadingHTTPServer(("127.0.0.1", self._port), Handler)
        self._server.daemon_threads = True
        self._port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def stop(self) -> None:
        """Go away: connections are refused."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def rows(self, run: str) -> list[dict[str, Any]]:
        """The rows of a run in order."""
        return [row for _, row in sorted(self.history.get(run, {}).items())]

    def history_keys(self, run: str) -> dict[str, Any]:
        """What is said of a run's rows before they are asked for."""
        keys = {key for row in self.rows(run) for key in row}
        kinds = {"typeCounts": [{"type": "number", "count": 1}], "monotonic": False}
        last = max((row["_step"] for row in self.rows(run)), default=-1)
        return {"lastStep": last, "sets": [], "keys": dict.fromkeys(keys, kinds)}

    def details(self, run: str) -> dict[str, Any] | None:
        """A run as the public API shows it; None: there is none."""
        if run not in self.history and run not in self.states:
            return None
        texts = dict.fromkeys(("systemMetrics", "summaryMetrics"), "{}")
        times = dict.fromkeys(("createdAt", "heartbeatAt"), "2026-01-01T00:00:00Z")
        empty = dict.fromkeys(("group", "jobType", "commit", "sweepName"))
        return {
            "id": "r",
            "projectId": "1",
            "name": run,
            "displayName": run,
            "tags": [],
            "description": "",
            "notes": "",
            "readOnly": False,
            "state": self.states.get(run, "finished"),
            "user": {"name": "e", "username": "e"},
            "historyLineCount": len(self.rows(run)),
            "historyKeys": self.history_keys(run),
            "config": self.configs.get(run, "{}"),
            **texts,
            **times,
            **empty,
        }

    def node(self) -> dict[str, Any]:
        """An artifact of a run as the public API shows it."""
        entity = {"id": "e", "name": "e"}
        project = {"id": "p", "internalId": "p", "name": "p", "entity": entity}
        kind = {"id": "t", "name": "staleness-trace", "project": project}
        sequence = {"__typename": "ArtifactSequence", "name": "staleness-trace", "project": project}
        return {
            "id": "a",
            "artifactSequence": sequence,
            "artifactType": kind,
            "versionIndex": 0,
            "state": "COMMITTED",
            "metadata": "{}",
            "ttlDurationSeconds": -2,
            "ttlIsInherited": True,
            "tags": [],
            "size": 1,
            "digest": "d",
            "fileCount": 1,
            "createdAt": "2026-01-01T00:00:00Z",
            **dict.fromkeys(("description", "historyStep", "commitHash", "updatedAt")),
        }

    def content(self, path: str) -> bytes | None:
        """What is to be had at an address: the file of the artifact, and what says so."""
        if self.file and path.startswith("/artifactsV2/"):
            return self.file
        if not self.file or path != "/manifest":
            return None
        digest = base64.b64encode(hashlib.md5(self.file).digest()).decode()
        entry = {"digest": digest, "birthArtifactID": "a", "size": len(self.file)}
        policy = {"storagePolicy": "wandb-storage-policy-v1"}
        config = {"storagePolicyConfig": {"storageLayout": "V2"}}
        contents = {"contents": {"rollout_trace.jsonl.gz": entry}}
        return json.dumps({"version": 1, **policy, **config, **contents}).encode()

    def answer(self, operation: str, variables: dict[str, Any]) -> dict[str, Any]:
        """The data of a GraphQL answer."""
        self.operations.append(operation)
        project = {"id": "p", "name": "p", "entity": {"id": "e", "name": "e"}}
        run = {"id": "r", "displayName": "r", "sweepName": None, "historyLineCount": 0}
        match operation:
            case "Viewer":
                viewer = {"id": "v", "entity": "e", "username": "e", "flags": "{}"}
                return {"viewer": viewer | {"teams": {"edges": []}}}
            case "UpsertBucket":
                if variables.get("config"):
                    self.configs[variables["name"]] = variables["config"]
                bucket = run | {"name": variables["name"], "project": project, "config": "{}"}
                return {"upsertBucket": {"bucket": bucket, "inserted": True}}
            case "ServerFeaturesQuery":
                return {"serverInfo": {"features": []}}
            case "RunResumeStatus":
                model = {"id": "p", "name": "p", "entity": project["entity"], "bucket": None}
                rows = self.rows(variables["name"])
                if rows:
                    tail = json.dumps([json.dumps(rows[-1])])
                    model["bucket"] = run | {
                        "name": variables["name"],
                        "historyLineCount": len(rows),
                        "eventsLineCount": 0,
                        "logLineCount": 0,
                        "historyTail": tail,
                        "eventsTail": "[]",
                        "summaryMetrics": "{}",
                        "config": self.configs.get(variables["name"], "{}"),
                        "tags": [],
                        "wandbConfig": json.dumps({"t": 1}),
                    }
                return {"model": model}
            case "GetDefaultEntity":
                return {"viewer": {"id": "v", "entity": "e", "username": "e"}}
            case "Run":
                return {"project": {"run": self.details(variables["name"])}}
            case "RunHistoryKeys":
                keys = self.history_keys(variables["name"])
                return {"project": {"run": {"historyKeys": keys}}}
            case "RunParquetHistory":
                known = self.rows(variables["runName"])
                history = {"parquetUrls": [], "liveData": known}
                return {"project": {"run": {"parquetHistory": history}}}
            case "HistoryPage":
                first, stop = variables["minStep"], variables["maxStep"]
                page = [
                    json.dumps(row)
                    for row in self.rows(variables["run"])
                    if first <= row["_step"] < stop
                ]
                return {"project": {"run": {"history": page}}}
            case "RunOutputArtifacts":
                edges = [{"cursor": "c", "node": self.node()}] if self.file else []
                page = {"pageInfo": {"endCursor": None, "hasNextPage": False}, "edges": edges}
                return {"project": {"run": {"artifacts": {"totalCount": len(edges), **page}}}}
            case "FetchArtifactManifest":
                file = {"directUrl": f"{self.url}/manifest"}
                return {"artifact": {"currentManifest": {"file": file}}}
            case "CreateRunFiles":
                return {"createRunFiles": {"runID": "r", "uploadHeaders": [], "files": []}}
            case "NotifyScriptableRunAlert":
                self.alerts.append(variables)
                return {"notifyScriptableRunAlert": {"success": True}}
            case "ArtifactType":
                return {"project": None}
            case "CreateArtifact":
                self.artifacts.append(variables["input"])
                artifact = {"id": "a", "state": "COMMITTED", "artifactSequence": {"id": "s"}}
                return {"createArtifact": {"artifact": artifact}}
            case _:
                return {}


class _Handler(BaseHTTPRequestHandler):
    server_stub: StubServer
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        if self.server_stub.refuse is not None:
            self.reply({"error": "refused"}, status=self.server_stub.refuse)
        elif self.path.endswith("/graphql"):
            asked = json.loads(body)
            name = re.search(r"(?:query|mutation)\s+(\w+)", asked["query"])
            operation = name.group(1) if name else "?"
            self.reply({"data": self.server_stub.answer(operation, asked.get("variables") or {})})
        elif self.path.endswith("/file_stream"):
            self.take_rows(self.path.split("/")[-2], json.loads(body))
            self.reply({"exitcode": None, "limits": {}})
        else:
            self.reply({})

    do_PUT = do_POST

    def do_GET(self) -> None:
        content = self.server_stub.content(self.path)
        if content is None:
            self.reply({})
        else:
            self.send(content, 200)

    def take_rows(self, run: str, stream: dict[str, Any]) -> None:
        chunk = (stream.get("files") or {}).get("wandb-history.jsonl")
        if chunk:
            kept = self.server_stub.history.setdefault(run, {})
            for place, line in enumerate(chunk["content"], chunk["offset"]):
                kept[place] = json.loads(line)
                self.server_stub.received.append((run, kept[place]))

    def reply(self, value: object, status: int = 200) -> None:
        self.send(json.dumps(value).encode(), status)

    def send(self, body: bytes, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass
