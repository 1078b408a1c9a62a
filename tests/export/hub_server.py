"""A stub of the Hugging Face hub on the loopback device: models are stored in memory."""

import base64
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "stub-token"


@dataclass
class Hub:
    """The hub.

    Attributes:
        models: Files by name, by the name of the model.
        requests: Method and path of all requests.
        endpoint: Its address.
    """

    models: dict[str, dict[str, bytes]] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    endpoint: str = ""


class Handler(BaseHTTPRequestHandler):
    """Answers requests."""

    hub: Hub

    def log_message(self, *arguments: Any) -> None:
        """Print nothing."""

    def answer(self, code: int, content: bytes = b"", **headers: str) -> None:
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if "Content_Length" not in headers:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def answer_json(self, value: Any, code: int = 200) -> None:
        self.answer(code, json.dumps(value).encode(), Content_Type="application/json")

    def handle_request(self) -> None:
        path = self.path.partition("?")[0]
        self.hub.requests.append(f"{self.command} {path}")
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if file := re.fullmatch(r"/([\w.-]+/[\w.-]+)/resolve/(\w+)/(.+)", path):
            self.send_file(*file.groups())
        elif self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.answer_json({"error": "Invalid username or password."}, 401)
        elif path == "/api/whoami-v2":
            self.answer_json({"type": "user", "name": "user", "fullname": "A User", "orgs": []})
        elif path == "/api/validate-yaml":
            self.answer_json({"errors": [], "warnings": []})
        elif path == "/api/repos/create":
            self.create(json.loads(body))
        elif change := re.fullmatch(r"/api/models/([\w.-]+/[\w.-]+)/(preupload|commit)/main", path):
            self.upload(*change.groups(), body)
        elif info := re.fullmatch(r"/api/models/([\w.-]+/[\w.-]+)(/revision/main)?", path):
            siblings = [{"rfilename": name} for name in self.hub.models[info[1]]]
            self.answer_json({"id": info[1], "sha": COMMIT, "siblings": siblings, "private": False})
        else:
            self.answer_json({"error": f"no {path}"}, 404)

    do_GET = do_HEAD = do_POST = handle_request

    def create(self, asked: dict[str, Any]) -> None:
        name = f"{asked.get('organization') or 'user'}/{asked['name']}"
        if not name.startswith("user/"):
            self.answer_json({"error": "You don't have the rights to create a model under this namespace"}, 403)
            return
        self.hub.models.setdefault(name, {})
        self.answer_json({"url": f"{self.hub.endpoint}/{name}", "name": name})

    def upload(self, model: str, step: str, body: bytes) -> None:
        if step == "preupload":
            files = [{"path": file["path"], "uploadMode": "regular"} for file in json.loads(body)["files"]]
            self.answer_json({"files": [{**file, "shouldIgnore": False} for file in files]})
            return
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                self.hub.models[model][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        url = f"{self.hub.endpoint}/{model}/commit/{COMMIT}"
        self.answer_json({"commitUrl": url, "commitOid": COMMIT, "hookOutput": ""})

    def send_file(self, model: str, revision: str, name: str) -> None:
        files = self.hub.models.get(model)
        if files is None:
            self.answer(401, X_Error_Code="RepoNotFound", X_Error_Message="Repository not found")
        elif revision not in ("main", COMMIT):
            self.answer(404, X_Error_Code="RevisionNotFound", X_Error_Message="Invalid rev id")
        elif name not in files:
            self.answer(404, X_Error_Code="EntryNotFound", X_Error_Message="Entry not found", X_Repo_Commit=COMMIT)
        else:
            tag = f'"{hash(files[name]) & 0xFFFFFFFF:08x}"'
            self.answer(200, files[name], ETag=tag, X_Repo_Commit=COMMIT, Accept_Ranges="bytes")


@contextmanager
def serve_hub() -> Iterator[Hub]:
    """A context with a running hub."""
    hub = Hub()
    handler = type("HubHandler", (Handler,), {"hub": hub})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        hub.endpoint = f"http://127.0.0.1:{server.server_port}"
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()
