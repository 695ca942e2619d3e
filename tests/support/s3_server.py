"""An S3 server on this machine: moto's, in another process."""

import os
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager


class Server:
    def __init__(self, port, process):
        self.port, self.process = port, process

    def bucket(self, name):
        """Creates a bucket and returns its address, with all that pyarrow needs to reach it."""
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/{name}", method="PUT")
        assert urllib.request.urlopen(request, timeout=30).status == 200
        settings = f"endpoint_override=127.0.0.1:{self.port}&scheme=http&region=us-east-1"
        return f"s3://testing:testing@{name}/run/records?{settings}"

    def stop(self):
        self.process.terminate()
        self.process.wait(30)


@contextmanager
def s3_server(log):
    """Starts the server on a free port. Its packages may be in the folder TRUSTRL_MOTO instead of this environment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = {**os.environ, "PYTHONPATH": os.environ.get("TRUSTRL_MOTO", "")}
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with open(log, "wb") as out:
        server = Server(port, subprocess.Popen(command, stdout=out, stderr=out, env=env))
    try:
        for _ in range(240):
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                assert server.process.poll() is None, log.read_text()
                time.sleep(0.25)
        yield server
    finally:
        server.stop()
