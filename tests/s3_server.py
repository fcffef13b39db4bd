"""A small S3 server for tests, which keeps objects in memory and can fail in chosen ways.

It answers the requests that obstore sends: put (also multipart and copy), ranged get, head, list
and delete. Signatures are not checked.
"""

import hashlib
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

Fault = Callable[[str, str], str]  # of a method and an object's name: "", 503, cut, slow or flip


def _none(method: str, name: str) -> str:
    return ""


class Server(ThreadingHTTPServer):
    """The bucket ``bucket``; ``objects`` holds its content by name, ``log`` each request."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects: dict[str, bytes] = {}
        self.parts: dict[str, dict[int, bytes]] = {}
        self.fault: Fault = _none
        self.log: list[tuple[str, str]] = []

    @property
    def environment(self) -> dict[str, str]:
        """The variables with which a client finds the server."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.server_port}",
            "AWS_ACCESS_KEY_ID": "tester",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
        }


@contextmanager
def running() -> Iterator[Server]:
    """Serve from a thread of this process."""
    server = Server()
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""

    def _serve(self) -> None:
        url = urlsplit(self.path)
        self.query = {
            key: values[0] for key, values in parse_qs(url.query, keep_blank_values=True).items()
        }
        self.name = unquote(url.path).removeprefix("/bucket").lstrip("/")
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.log.append((self.command, self.name))
        self.kind = self.server.fault(self.command, self.name)
        if self.kind == "slow":
            time.sleep(0.3)
        if self.kind.isdigit():
            self._send(int(self.kind), b"<Error><Code>SlowDown</Code></Error>")
        else:
            getattr(self, f"_{self.command.lower()}")()

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _serve

    def _send(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key.replace("_", "-"), value)
        length = int(headers.get("length", len(body)))
        self.send_header("Content-Length", str(length))
        self.end_headers()
        if self.kind == "cut" and body:
            self.wfile.write(body[: len(body) // 2])
            self.close_connection = True
        elif self.command != "HEAD":
            self.wfile.write(body)

    def _etag(self, body: bytes) -> str:
        return f'"{hashlib.md5(body).hexdigest()}"'

    def _get(self) -> None:
        if "list-type" in self.query:
            self._list()
            return
        if (body := self.server.objects.get(self.name)) is None:
            self._send(404, b"<Error><Code>NoSuchKey</Code></Error>")
            return
        status, more = 200, {}
        if found := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or ""):
            start, stop = int(found[1]), int(found[2] or len(body) - 1) + 1
            whole, body, status = len(body), body[start:stop], 206
            more = {"Content_Range": f"bytes {start}-{start + len(body) - 1}/{whole}"}
        if self.kind == "flip" and body:
            body = body[:-1] + bytes([body[-1] ^ 1])
        self._send(
            status, body, ETag=self._etag(body), Last_Modified=formatdate(usegmt=True), **more
        )

    def _head(self) -> None:
        self._get()

    def _list(self) -> None:
        prefix = self.query.get("prefix", "")
        rows = "".join(
            f"<Contents><Key>{escape(name)}</Key><Size>{len(body)}</Size><ETag>e</ETag>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            for name, body in sorted(self.server.objects.items())
            if name.startswith(prefix)
        )
        text = f"<ListBucketResult><IsTruncated>false</IsTruncated>{rows}</ListBucketResult>"
        self._send(200, text.encode())

    def _put(self) -> None:
        if source := self.headers.get("x-amz-copy-source"):
            body = self.server.objects[unquote(source).lstrip("/").removeprefix("bucket/")]
            self.server.objects[self.name] = body
            text = f"<CopyObjectResult><ETag>{self._etag(body)}</ETag></CopyObjectResult>"
            self._send(200, text.encode())
        elif "uploadId" in self.query:
            self.server.parts[self.query["uploadId"]][int(self.query["partNumber"])] = self.body
            self._send(200, ETag=self._etag(self.body))
        else:
            self.server.objects[self.name] = self.body
            self._send(200, ETag=self._etag(self.body))

    def _post(self) -> None:
        if "uploads" in self.query:
            upload = f"upload{len(self.server.parts)}"
            self.server.parts[upload] = {}
            text = (
                "<InitiateMultipartUploadResult>"
                f"<UploadId>{upload}</UploadId></InitiateMultipartUploadResult>"
            )
        elif "uploadId" in self.query:
            parts = self.server.parts.pop(self.query["uploadId"])
            self.server.objects[self.name] = b"".join(parts[number] for number in sorted(parts))
            etag = self._etag(self.server.objects[self.name])
            kind = "CompleteMultipartUploadResult"
            text = f"<{kind}><ETag>{etag}</ETag></{kind}>"
        else:
            names = re.findall(r"<Key>([^<]*)</Key>", self.body.decode())
            for name in names:
                self.server.objects.pop(name, None)
            rows = "".join(f"<Deleted><Key>{name}</Key></Deleted>" for name in names)
            text = f"<DeleteResult>{rows}</DeleteResult>"
        self._send(200, text.encode())

    def _delete(self) -> None:
        self.server.parts.pop(self.query.get("uploadId", ""), None)
        self.server.objects.pop(self.name, None)
        self._send(204)
