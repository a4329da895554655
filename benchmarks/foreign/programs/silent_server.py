"""A server of settings that holds each request until there are new settings, which there never are.

python silent_server.py FILE    (writes its port to FILE)
"""

import http.server
import sys
import threading
from pathlib import Path


class Settings(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        threading.Event().wait()


def main():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Settings)
    Path(sys.argv[1]).write_text(str(server.server_port))
    server.serve_forever()


if __name__ == "__main__":
    main()
