"""A role process for tests: serves HTTP, brings up a child that is hard to get rid of, misbehaves on request.

Standard library only, started as a plain script.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

# In a session of its own, deaf to TERM: what a killed engine leaves behind on a bad day.
STUBBORN_CHILD = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"

answers = itertools.count()
started_s = time.monotonic()


def answers_200(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=1) as response:
            return bool(response.status == 200)
    except OSError:
        return False


class Handler(BaseHTTPRequestHandler):
    options: argparse.Namespace

    def do_GET(self) -> None:
        waiting = time.monotonic() - started_s < self.options.ready_after_s
        if self.options.depends_on:
            waiting = waiting or not answers_200(self.options.depends_on)
        self.reply(503 if self.options.never_ready or waiting else 200, {})

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        text = f"answer to {request['messages'][0]['content']}"
        if self.options.fickle:
            text += f", number {next(answers)}"
        if self.options.rounds and not next(answers):
            text += ", computed whole"
        if self.options.silent:
            text = ""
        if self.options.refuses:
            self.reply(404, {"error": {"message": "no such model"}})
            return
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "length"}
        if request.get("return_token_ids"):
            choice["token_ids"] = list(range(request["max_tokens"]))
            if "computed whole" in text:
                choice["token_ids"][self.options.turns_at] += 1
        self.reply(200, {"choices": [choice], "usage": {"completion_tokens": request["max_tokens"]}})

    def reply(self, status: int, body: Any) -> None:
        payload = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, format: str, *args: Any) -> None:
        print(format % args, file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--eat-mib", type=int, default=0, help="memory to take once it serves")
    parser.add_argument("--ready-after-s", type=float, default=0.0)
    parser.add_argument("--depends-on", help="URL that must answer 200 before this is ready")
    parser.add_argument("--turns-at", type=int, default=2, help="with --rounds: the first answer's odd token")
    parser.add_argument("--crash", type=int, help="exit with this status at once")
    for flag in ("--never-ready", "--fickle", "--rounds", "--silent", "--refuses", "--deaf", "--with-child"):
        parser.add_argument(flag, action="store_true")
    options = parser.parse_args()
    Handler.options = options
    if options.with_child:
        subprocess.Popen([sys.executable, "-c", STUBBORN_CHILD], start_new_session=True)
    if options.crash is not None:
        print("the last words of a role", file=sys.stderr)
        sys.exit(options.crash)
    signal.signal(signal.SIGTERM, signal.SIG_IGN if options.deaf else lambda *_: os._exit(0))
    server = ThreadingHTTPServer((options.host, options.port), Handler)
    print(f"ready http://{options.host}:{options.port}", flush=True)
    eaten = bytearray(options.eat_mib << 20)
    eaten[::4096] = b"x" * len(eaten[::4096])
    server.serve_forever()


if __name__ == "__main__":
    main()
