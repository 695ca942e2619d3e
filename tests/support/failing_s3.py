"""An S3 server on this machine that can fail, hang, answer late, or store a file and lose the answer."""

import hashlib
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlparse


class FailingS3:
    """The server. `mode` is "up", "down" (503), "hang", "late" (after `seconds`) or "lost" (stores, then breaks off)."""

    def __init__(self):
        self.objects = {}
        """Content by bucket and key."""
        self.mode, self.seconds = "up", 1.0
        self.requests = []
        self._woken = threading.Event()
        handler = type("Handler", (_Handler,), {"server_of": self})
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._http.daemon_threads = True

    def address(self, name):
        """Address of a folder of a record. It names no keys; `environment` has them."""
        where = f"127.0.0.1:{self._http.server_port}"
        return f"s3://bucket/{name}?endpoint_override={where}&scheme=http&region=us-east-1"

    def wait(self, seconds):
        """Waits before an answer, until the server is up again or ends."""
        self._woken.wait(seconds)

    def turn(self, mode):
        """Changes the mode. Requests that hang are answered."""
        self.mode = mode
        self._woken.set()
        self._woken = threading.Event()

    def names(self, ending=""):
        """Keys in the bucket that end so."""
        return sorted(name.removeprefix("bucket/") for name in self.objects if name.endswith(ending))


environment = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_EC2_METADATA_DISABLED": "true"}


@contextmanager
def failing_s3():
    server = FailingS3()
    thread = threading.Thread(target=server._http.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.turn("up")
        server._http.shutdown()
        server._http.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *arguments):
        pass

    def _answer(self):
        server, method = self.server_of, self.command
        body = self._body()
        parts = urlparse(self.path)
        key, query = unquote(parts.path).lstrip("/"), parse_qs(parts.query, keep_blank_values=True)
        mode = server.mode
        server.requests.append((method, key, mode))
        if mode in ("hang", "late"):
            server.wait(3600.0 if mode == "hang" else server.seconds)
        if mode == "down":
            return self._reply(503, b"<Error><Code>InternalError</Code><Message>down</Message></Error>")
        if method == "PUT":
            server.objects[key] = _unchunked(body, self.headers)
            if mode == "lost":
                self.close_connection = True
                return self.connection.close()
            return self._reply(200, b"", {"ETag": f'"{hashlib.md5(body).hexdigest()}"'})
        if method == "DELETE":
            server.objects.pop(key, None)
            return self._reply(204, b"")
        if method == "GET" and ("list-type" in query or "/" not in key):
            prefix, delimiter = query.get("prefix", [""])[0], query.get("delimiter", [""])[0]
            return self._reply(200, _listing(server.objects, key.split("/")[0], prefix, delimiter))
        if method in ("GET", "HEAD"):
            return self._object(server.objects.get(key))
        return self._reply(200, b"")  # POST of a deletion of nothing

    def _body(self):
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    do_GET = do_PUT = do_DELETE = do_HEAD = do_POST = _answer

    def _object(self, content):
        if content is None:
            return self._reply(404, b"<Error><Code>NoSuchKey</Code></Error>")
        wanted = self.headers.get("Range")
        if wanted and self.command == "GET":
            first, last = wanted.split("=")[1].split("-")
            end = min(int(last or len(content) - 1), len(content) - 1)
            header = {"Content-Range": f"bytes {first}-{end}/{len(content)}"}
            return self._reply(206, content[int(first) : end + 1], header)
        return self._reply(200, content, {"ETag": '"x"', "Last-Modified": "Wed, 01 Jan 2025 00:00:00 GMT"})

    def _reply(self, code, content, headers=None):
        try:
            self.send_response(code)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)
        except OSError:  # the client has given up
            self.close_connection = True


def _unchunked(body, headers):
    """The content of a request whose body has a signature for each chunk."""
    if "aws-chunked" not in (headers.get("Content-Encoding") or "") and not headers.get("x-amz-decoded-content-length"):
        return body
    content = b""
    while body:
        head, _, body = body.partition(b"\r\n")
        size = int(head.split(b";")[0] or b"0", 16)
        if not size:
            break
        content, body = content + body[:size], body[size + 2 :]
    return content


def _listing(objects, bucket, prefix, delimiter):
    keys, folders = [], set()
    for name in sorted(objects):
        key = name.removeprefix(f"{bucket}/")
        if not key.startswith(prefix) or not name.startswith(f"{bucket}/"):
            continue
        rest = key[len(prefix) :]
        if delimiter and delimiter in rest:
            folders.add(prefix + rest.split(delimiter)[0] + delimiter)
        else:
            keys.append(
                f"<Contents><Key>{key}</Key><Size>{len(objects[name])}</Size>"
                "<LastModified>2025-01-01T00:00:00.000Z</LastModified></Contents>"
            )
    common = [f"<CommonPrefixes><Prefix>{folder}</Prefix></CommonPrefixes>" for folder in sorted(folders)]
    return (
        f"<?xml version='1.0'?><ListBucketResult><Name>{bucket}</Name><KeyCount>{len(keys)}</KeyCount>"
        f"<IsTruncated>false</IsTruncated>{''.join(keys + common)}</ListBucketResult>"
    ).encode()
