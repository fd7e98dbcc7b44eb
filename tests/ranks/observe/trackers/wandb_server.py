"""Fake Weights & Biases server that stores and resumes runs. Contains no tests."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any


@dataclass
class FakeServer:
    """State of the server: runs by id with the lines of their files, and the API keys of requests."""

    url: str = ""
    keys: set[str] = field(default_factory=set)
    runs: dict[str, dict[str, Any]] = field(default_factory=dict)
    refuses: bool = False

    def history(self, run_id: str) -> list[dict[str, Any]]:
        lines: dict[int, str] = self.runs[run_id]["files"].get("wandb-history.jsonl", {})
        return [json.loads(lines[number]) for number in sorted(lines)]

    def answer(self, path: str, body: bytes) -> dict[str, Any]:
        if path == "/graphql":
            return {"data": self._query(json.loads(body))}
        if path.endswith("/file_stream"):
            self._stream(path.split("/")[-2], json.loads(body))
        return {}

    def _query(self, request: dict[str, Any]) -> dict[str, Any]:
        query, variables = request["query"], request.get("variables") or {}
        if "RunResumeStatus" in query:
            run_id = variables["name"]
            return {"model": {"id": "p", "name": "p", "bucket": self._bucket(run_id) if run_id in self.runs else None}}
        if "UpsertBucket" in query:
            run_id = variables["name"]
            is_new = run_id not in self.runs
            run = self.runs.setdefault(run_id, {"files": {}, "given": {}})
            run["given"] |= {name: value for name, value in variables.items() if value is not None}
            return {"upsertBucket": {"bucket": self._bucket(run_id), "inserted": is_new}}
        if "CreateRunFiles" in query:
            files = [{"name": name, "uploadUrl": f"{self.url}/upload"} for name in variables["files"]]
            return {"createRunFiles": {"runID": variables["run"], "uploadHeaders": [], "files": files}}
        return {}

    def _bucket(self, run_id: str) -> dict[str, Any]:
        given, history = self.runs[run_id]["given"], self.history(run_id)
        entity = {"id": "e", "name": given.get("entity", "someone")}
        return {
            "id": run_id,
            "name": run_id,
            "displayName": given.get("displayName"),
            "config": given.get("config", "{}"),
            "project": {"id": "p", "name": given.get("project"), "entity": entity},
            "historyLineCount": len(history),
            "historyTail": json.dumps([json.dumps(history[-1])] if history else []),
            "summaryMetrics": json.dumps(history[-1] if history else {}),
            "eventsLineCount": 0,
            "eventsTail": "[]",
            "logLineCount": 0,
            "tags": [],
            "wandbConfig": json.dumps({"t": {}}),  # without it wandb treats the run as not started
        }

    def _stream(self, run_id: str, message: dict[str, Any]) -> None:
        for name, chunk in message.get("files", {}).items():
            lines = self.runs[run_id]["files"].setdefault(name, {})
            lines.update(enumerate(chunk["content"], start=chunk["offset"]))


@contextmanager
def wandb_server() -> Iterator[FakeServer]:
    """Serves on localhost within the context."""
    fake = FakeServer()

    class Handler(BaseHTTPRequestHandler):
        def _handle(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            login = self.headers.get("Authorization", "").removeprefix("Basic ")
            if login:
                fake.keys.add(base64.b64decode(login).decode().removeprefix("api:"))
            text = json.dumps(fake.answer(self.path, body)).encode()
            self.send_response(401 if fake.refuses else 200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_GET = do_POST = do_PUT = _handle

        def log_message(self, format: str, *args: Any) -> None:
            """Suppresses the log."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    fake.url = f"http://127.0.0.1:{server.server_port}"
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield fake
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
