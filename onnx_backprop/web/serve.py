"""A static server for a site, with the headers that give a page shared memory, and so threads."""

import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from onnx_backprop.opset.core.errors import InvalidArgumentError

HEADERS = {
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Embedder-Policy": "require-corp",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
TYPES = {".js": "text/javascript", ".mjs": "text/javascript", ".wasm": "application/wasm", ".json": "application/json"}


class _Handler(SimpleHTTPRequestHandler):
    extensions_map = SimpleHTTPRequestHandler.extensions_map | TYPES

    def end_headers(self) -> None:
        for name, value in HEADERS.items():
            self.send_header(name, value)
        super().end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Failures alone."""
        if len(args) > 1 and str(args[1])[:1] in "45":
            sys.stderr.write(f"{format % args}\n")


def server(folder: str | Path, *, port: int = 8000, host: str = "127.0.0.1") -> ThreadingHTTPServer:
    """A server of the folder, which listens from now on. port: 0 for any that is free.

    Errors: InvalidArgumentError for a folder without a site, and a port that cannot be had.
    """
    if not (Path(folder) / "site.json").is_file():
        raise InvalidArgumentError(f"{folder} holds no site. Write one with `onnx-backprop web MODEL … -o {folder}`")
    try:
        return ThreadingHTTPServer((host, port), partial(_Handler, directory=str(folder)))
    except (OSError, OverflowError) as e:
        raise InvalidArgumentError(f"cannot listen on {host}:{port}: {e}. Name another --port") from e
