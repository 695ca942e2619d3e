"""The built site on the loopback address."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

SIZES = {"laptop": (1366, 768), "phone": (390, 844)}
KINDS = (
    "", "tour/", "guides/choosing-a-region/", "guides/explain/", "concepts/clip-mask-project/", "algorithms/troll/",
    "engines/verl/", "results/", "results/i-mismatch/", "reference/api/", "reference/metrics/", "scale/",
    "project/contributing/", "architecture/", "notebooks/why-the-clip-is-the-wrong-shape/",
)  # fmt: skip
"""A page of each kind."""


class Quiet(SimpleHTTPRequestHandler):
    """Serves files and says nothing."""

    def log_message(self, format, *args):
        pass


@contextmanager
def served(site: Path) -> Iterator[str]:
    """The address of the site while it is served, with a slash at its end."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site)))
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
