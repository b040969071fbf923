"""`onnx-backprop serve`: serve a page that `web` has written."""

import argparse

from onnx_backprop.command.parser import Command, argument


def run(arguments: argparse.Namespace) -> int:
    """Serve until it is interrupted."""
    from onnx_backprop.web.serve import server  # not before: the other commands need none

    with server(arguments.site, port=arguments.port, host=arguments.host) as running:
        print(f"http://{arguments.host}:{running.server_port}/ (Ctrl-C ends it)", flush=True)
        running.serve_forever()
    return 0


COMMAND = Command(
    description="Serves on this machine alone, unless --host says otherwise, until it is interrupted. Sends the "
    "headers under which a browser lets the page use threads.",
    run=run,
    arguments=[
        argument("site", metavar="SITE", help="the folder that `web` has written"),
        argument("--port", default=8000, help="0: any that is free (%(default)s)"),
        argument("--host", default="127.0.0.1", help="the address to listen on (%(default)s)"),
    ],
)
