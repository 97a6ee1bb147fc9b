"""A stand-in for the Hugging Face Hub on this machine, with the requests that its library makes to upload and download models.

It keeps repositories in memory, counts what it receives and sends, and can stop in the middle of a file until the client is gone.
Files ending with .safetensors are stored by LFS, as on the hub: those over PART bytes are sent in parts.
"""

import base64
import hashlib
import json
import re
import threading
from collections import Counter
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

PART = 8 * 10**6
BLOCK = 2**16
TOKEN = "hf_" + "TopSecret" * 4


@dataclass
class Repository:
    private: bool = True
    gated: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """The files of each commit."""
    branches: dict[str, str] = field(default_factory=dict)

    def commit(self, files: dict[str, bytes], branch: str = "main") -> str:
        sha = hashlib.sha1(repr((len(self.commits), branch)).encode()).hexdigest()
        self.commits[sha] = files
        self.branches[branch] = sha
        return sha

    def sha(self, revision: str) -> str | None:
        return revision if revision in self.commits else self.branches.get(revision)


def is_lfs(path: str) -> bool:
    return path.endswith(".safetensors")


class Hub(ThreadingHTTPServer):
    """The server, at 127.0.0.1 and a free port; a context manager that runs it in a thread."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}
        """What LFS holds, by SHA-256."""
        self.parts: dict[str, dict[int, bytes]] = {}
        self.received: Counter[str] = Counter()
        """Bytes of each LFS object that came, whole or not."""
        self.sent: Counter[str] = Counter()
        """Bytes of each file that were sent."""
        self.requests: Counter[str] = Counter()
        self.messages: list[str] = []
        """Summaries of commits."""
        self.hold: tuple[str, int] | None = None
        """An LFS object's SHA-256, or a file's name, and the bytes of it after which the server waits."""
        self.damaged: str | None = None
        """A file of which other bytes are sent than those that are stored."""
        self.held, self.go_on = threading.Event(), threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}"

    @staticmethod
    def oid(content: bytes) -> str:
        """The name of an LFS object."""
        return hashlib.sha256(content).hexdigest()

    def __enter__(self) -> "Hub":
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self.go_on.set()
        self.shutdown()
        self.server_close()

    def handle_error(self, request, client_address) -> None:
        """Says nothing of clients that were killed."""

    def wait_at(self, name: str, count: int) -> None:
        if self.hold and name == self.hold[0] and count >= self.hold[1]:
            self.held.set()
            self.go_on.wait(60)
            raise ConnectionError("the client was killed")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *_) -> None:
        pass

    def answer(self, content: object, status: int = 200, **headers: str) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def fail(self, status: int, code: str) -> None:
        self.answer({"error": code}, status, X_Error_Code=code)

    def body(self, name: str = "") -> bytes:
        """What the client sends; counted for the LFS object `name`."""
        if self.headers.get("Transfer-Encoding") == "chunked":
            blocks = []
            while size := int(self.rfile.readline(), 16):
                blocks.append(self.rfile.read(size))
                self.rfile.readline()
                self._count(name, len(blocks[-1]))
            self.rfile.readline()
            return b"".join(blocks)
        missing, blocks = int(self.headers.get("Content-Length", 0)), []
        while missing:
            block = self.rfile.read1(min(BLOCK, missing))
            if not block:
                raise ConnectionError("the client is gone")
            missing -= len(block)
            blocks.append(block)
            self._count(name, len(block))
        return b"".join(blocks)

    def _count(self, name: str, count: int) -> None:
        if name:
            self.server.received[name] += count
            self.server.wait_at(name, self.server.received[name])

    def repository(self, name: str) -> Repository | None:
        """A repository that this client may read; otherwise the request is answered with the hub's error."""
        found = self.server.repositories.get(name)
        known = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if found is None or (found.private and not known):
            self.fail(404 if known else 401, "RepoNotFound")
            return None
        if found.gated and not known:
            self.fail(403, "GatedRepo")
            return None
        return found

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        path, query = url.path, parse_qs(url.query)
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/([^/]+))?", path):
            self.server.requests["info"] += 1
            if repository := self.repository(found[1]):
                sha = repository.sha(unquote(found[2] or "main"))
                if sha is None:
                    return self.fail(404, "RevisionNotFound")
                siblings = [{"rfilename": name} for name in repository.commits[sha]]
                self.answer({"id": found[1], "sha": sha, "private": repository.private, "siblings": siblings})
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/([^/]+)", path):
            self.server.requests["tree"] += 1
            if repository := self.repository(found[1]):
                files = repository.commits[repository.sha(unquote(found[2]))]
                assert query.get("recursive") != ["false"] or not any("/" in name for name in files)
                self.answer([self.entry(name, content) for name, content in files.items()])
        elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            if repository := self.repository(found[1]):
                sha = repository.sha(unquote(found[2]))
                self.send_file(sha, unquote(found[3]), repository.commits[sha].get(unquote(found[3])))
        else:
            self.fail(404, "NotHere")

    do_HEAD = do_GET

    @staticmethod
    def entry(name: str, content: bytes) -> dict:
        oid = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        entry = {"type": "file", "path": name, "size": len(content), "oid": oid}
        if is_lfs(name):
            entry["lfs"] = {"oid": Hub.oid(content), "size": len(content), "pointerSize": 134}
        return entry

    def send_file(self, sha: str, name: str, content: bytes | None) -> None:
        if content is None:
            return self.fail(404, "EntryNotFound")
        entry = self.entry(name, content)
        etag = entry["lfs"]["oid"] if is_lfs(name) else entry["oid"]
        start = int((re.match(r"bytes=(\d+)-", self.headers.get("Range", "")) or [0, 0])[1])
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(content) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        for header, value in {"ETag": f'"{etag}"', "X-Repo-Commit": sha, "Accept-Ranges": "bytes"}.items():
            self.send_header(header, value)
        self.end_headers()
        if name == self.server.damaged:
            content = content[:-1] + bytes([content[-1] ^ 1])
        for at in range(start, len(content), BLOCK) if self.command == "GET" else ():
            self.wfile.write(content[at : at + BLOCK])
            self.server.sent[name] += len(content[at : at + BLOCK])
            self.server.wait_at(name, self.server.sent[name])

    def do_POST(self) -> None:
        path = urlsplit(self.path).path
        content = self.body()
        if path == "/api/validate-yaml":
            return self.answer({"errors": [], "warnings": []})
        if found := re.fullmatch(r"/parts/([0-9a-f]{64})", path):
            assert "Authorization" not in self.headers  # as in do_PUT
            parts = self.server.parts.pop(found[1])
            self.store(found[1], b"".join(parts[number] for number in sorted(parts)))
            return self.answer({})
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.fail(401, "Unauthorized")
        if path == "/api/repos/create":
            asked = json.loads(content)
            name = f"{asked['organization']}/{asked['name']}"
            self.server.repositories[name] = Repository(asked.get("visibility") == "private")
            self.server.repositories[name].commit({".gitattributes": b"*.safetensors filter=lfs\n"})
            self.answer({"url": f"{self.server.url}/{name}"})
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/branch/(.+)", path):
            repository = self.server.repositories[found[1]]
            repository.branches.setdefault(unquote(found[2]), repository.branches["main"])
            self.answer({})
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/preupload/(.+)", path):
            repository = self.server.repositories[found[1]]
            there = repository.commits[repository.sha(unquote(found[2]))]
            self.answer({"files": [self.upload_mode(file["path"], there) for file in json.loads(content)["files"]]})
        elif found := re.fullmatch(r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", path):
            self.answer({"transfer": "basic", "objects": list(map(self.lfs_action, json.loads(content)["objects"]))})
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/(.+)", path):
            self.commit(self.server.repositories[found[1]], found[1], unquote(found[2]), content)
        else:
            self.fail(404, "NotHere")

    def upload_mode(self, path: str, there: dict[str, bytes]) -> dict:
        oid = None
        if path in there:
            entry = self.entry(path, there[path])
            oid = entry["lfs"]["oid"] if is_lfs(path) else entry["oid"]
        mode = "lfs" if is_lfs(path) else "regular"
        return {"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid}

    def lfs_action(self, asked: dict) -> dict:
        if asked["oid"] in self.server.objects:
            return asked
        if asked["size"] <= PART:
            return {**asked, "actions": {"upload": {"href": f"{self.server.url}/object/{asked['oid']}"}}}
        count = -(-asked["size"] // PART)
        urls = {f"{n:05d}": f"{self.server.url}/part/{asked['oid']}/{n}" for n in range(1, count + 1)}
        header = {"chunk_size": str(PART), **urls}
        return {**asked, "actions": {"upload": {"href": f"{self.server.url}/parts/{asked['oid']}", "header": header}}}

    def do_PUT(self) -> None:
        # Signed addresses of a store, to which the library must not send the token.
        assert "Authorization" not in self.headers
        if found := re.fullmatch(r"/part/([0-9a-f]{64})/(\d+)", self.path):
            self.server.parts.setdefault(found[1], {})[int(found[2])] = self.body(found[1])
        else:
            oid = self.path.removeprefix("/object/")
            self.store(oid, self.body(oid))
        self.answer(b"", ETag='"part"')

    def store(self, oid: str, content: bytes) -> None:
        assert Hub.oid(content) == oid
        self.server.objects[oid] = content

    def commit(self, repository: Repository, name: str, branch: str, content: bytes) -> None:
        files = dict(repository.commits[repository.branches[branch]])
        for line in map(json.loads, content.splitlines()):
            value = line["value"]
            match line["key"]:
                case "header":
                    self.server.messages.append(value["summary"])
                case "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                case "lfsFile":
                    files[value["path"]] = self.server.objects[value["oid"]]
                case "deletedFile":
                    del files[value["path"]]
        sha = repository.commit(files, branch)
        self.answer({"commitUrl": f"{self.server.url}/{name}/commit/{sha}", "commitOid": sha})
