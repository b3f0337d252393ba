"""Places where MLflow keeps runs, for tests: a database, a real server, a proxy that misbehaves."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

START_SECONDS = 240.0
"""A server on a machine that is busy otherwise."""


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@dataclass
class Place:
    """A tracking URI, and what its runs hold."""

    uri: str
    experiment: str
    client: Any

    def new_run(self) -> str:
        """A run that somebody else started."""
        return str(self.client.create_run(self.experiment).info.run_id)

    def runs(self) -> set[str]:
        """Ids of all runs, in whatever experiment."""
        experiments = [e.experiment_id for e in self.client.search_experiments()]
        return {run.info.run_id for run in self.client.search_runs(experiments)}

    def histories(self, run: str) -> dict[str, dict[int, float]]:
        """Every value of every metric, by step; a step that is there twice is an error."""
        histories = {}
        for key in self.client.get_run(run).data.metrics:
            points = self.client.get_metric_history(run, key)
            histories[key] = {point.step: point.value for point in points}
            assert len(histories[key]) == len(points), f"{key}: a step is there twice"
        return histories

    def files(self, run: str) -> list[str]:
        """Paths of the run's artifacts, of all folders."""
        found = self.client.list_artifacts(run)
        for folder in [file for file in found if file.is_dir]:
            found += self.client.list_artifacts(run, folder.path)
        return sorted(file.path for file in found if not file.is_dir)

    def content(self, run: str, name: str, folder: Path) -> bytes:
        """An artifact, fetched into the folder."""
        return Path(self.client.download_artifacts(run, name, str(folder))).read_bytes()

    def steps(self, run: str) -> list[int]:
        """Steps that have arrived."""
        return sorted(self.histories(run).get("staleness/tokens", {}))


class Server:
    """A real ``mlflow server`` with a database, on loopback."""

    def __init__(self, folder: Path) -> None:
        self.artifacts = folder / "artifacts"
        self._log = folder / "server.log"
        self._port = free_port()
        self.uri = f"http://127.0.0.1:{self._port}"
        self._command = [
            *(sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1"),
            *("--port", str(self._port), "--workers", "1"),
            *("--backend-store-uri", f"sqlite:///{folder}/mlflow.db"),
            *("--artifacts-destination", str(self.artifacts)),
        ]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until it answers."""
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
            )
        end = time.monotonic() + START_SECONDS
        while not self._answers():
            gone = self._process.poll() is not None
            if gone or time.monotonic() > end:
                self.kill()
                raise RuntimeError(f"mlflow server does not start:\n{self._log.read_text()}")
            time.sleep(0.5)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.uri}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def kill(self) -> None:
        """Kill it and its workers."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None


@dataclass
class Proxy:
    """Stands before a server and can be away, slow, full of refusals or forgetful."""

    port: int = field(default_factory=free_port)
    behind: str = ""
    answer: int | None = None
    """Status to answer with, instead of asking the server."""
    forgets: bool = False
    """Ask the server, and answer 503 all the same."""
    only: str = ""
    """Misbehave on paths that have this in them alone."""
    hang: threading.Event = field(default_factory=threading.Event)
    """Answer nothing while this is set."""
    batches: list[bytes] = field(default_factory=list)
    """Bodies of the batches that arrived, misbehaving or not."""
    _listening: ThreadingHTTPServer | None = None

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Listen."""
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            def do_any(self) -> None:
                status, content, kind = proxy.pass_on(self)
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = do_any

            def log_message(self, format: str, *args: object) -> None:
                pass

        class Listening(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: object, client_address: object) -> None:
                pass

        self._listening = Listening(("127.0.0.1", self.port), Handler)
        threading.Thread(
            target=self._listening.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
        ).start()

    def stop(self) -> None:
        """Be away: connections are refused."""
        if self._listening is not None:
            self._listening.shutdown()
            self._listening.server_close()
            self._listening = None

    def pass_on(self, request: BaseHTTPRequestHandler) -> tuple[int, bytes, str]:
        """Ask the server, or misbehave."""
        body = request.rfile.read(int(request.headers.get("Content-Length") or 0))
        if request.path.endswith("log-batch"):
            self.batches.append(body)
        if self.only in request.path:
            while self.hang.is_set():
                time.sleep(0.05)
            if self.answer is not None:
                return self.answer, b"no", "text/plain"
        server = http.client.HTTPConnection(self.behind, timeout=60)
        headers = {k: v for k, v in request.headers.items() if k.lower() != "host"}
        server.request(request.command, request.path, body=body, headers=headers)
        answer = server.getresponse()
        content = answer.read()
        server.close()
        if self.forgets and self.only in request.path:
            return 503, b"no", "text/plain"
        return answer.status, content, answer.headers.get("Content-Type", "text/plain")


@contextmanager
def proxy_before(server: Server) -> Iterator[Proxy]:
    """A proxy that is not listening yet."""
    proxy = Proxy(behind=server.uri.removeprefix("http://"))
    try:
        yield proxy
    finally:
        proxy.hang.clear()
        proxy.stop()
