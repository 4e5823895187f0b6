"""A real HTTP server on this machine that plays a judge's endpoint, and what the tests of the judge share.

It answers, fails, hangs and counts as a test tells it.
"""

import json
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np

from posttrain.config import JudgeConfig
from posttrain.core import http as endpoint_module
from posttrain.core.types import Prompt, Trajectory
from posttrain.rewards.judge import Judge

PROMPT = "{question}|{ground_truth}|{response}"


def completion(text, finish_reason="stop"):
    """A chat completion, as the status, headers and body of a reply."""
    choice = {"message": {"role": "assistant", "content": text}, "finish_reason": finish_reason}
    return 200, {}, json.dumps({"choices": [choice]})


def prompt_of(body):
    return body["messages"][0]["content"]


class Endpoint:
    """What the server does: ``reply(nth request, asked)`` gives (status, headers, body), where ``asked`` is what
    ``read`` takes from the request's body. It counts what comes in."""

    def __init__(self, reply, read):
        self.reply = reply
        self.read = read
        self.requests = []
        self.times = []
        self.at_once = self.most_at_once = 0
        self.lock = threading.Lock()
        self.released = threading.Event()

    @property
    def prompts(self):
        return [prompt_of(body) for _, _, body in self.requests]

    def handle(self, handler):
        body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        with self.lock:
            self.requests.append((handler.path, dict(handler.headers), body))
            self.times.append(time.monotonic())
            nth = len(self.requests)
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            status, headers, text = self.reply(nth, self.read(body))
        finally:
            with self.lock:
                self.at_once -= 1
        data = text.encode()
        handler.send_response(status)
        for name, value in ({"Content-Length": str(len(data))} | headers).items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(data)


@contextmanager
def serving(reply, read=prompt_of, get=""):
    """``get`` is what it answers to whoever asks with GET."""
    endpoint = Endpoint(reply, read)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            endpoint.handle(self)

        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Length", str(len(get)))
            self.end_headers()
            self.wfile.write(get.encode())

        def log_message(self, *_):
            """The server's own lines are no part of a test's output."""

    class Server(ThreadingHTTPServer):
        def handle_error(self, *_):
            """A client that gave up waiting is part of the tests."""

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    endpoint.url = f"http://127.0.0.1:{server.server_port}/v1"
    try:
        yield endpoint
    finally:
        endpoint.released.set()
        server.shutdown()
        server.server_close()
        thread.join()


def local_and_quick(monkeypatch):
    """No proxy between a client and this machine, and retries that take milliseconds."""
    monkeypatch.setattr(endpoint_module, "_BACKOFF_S", 0.02)
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)


def config(endpoint, **values):
    url = getattr(endpoint, "url", endpoint)
    return JudgeConfig(**{"url": url, "model": "judge-1", "prompt": PROMPT, "deadline_s": 5.0, **values})


def episode(answer="4", question="What is 2 + 2?", truth="4", messages=None, index=0):
    prompt = Prompt(index, [{"role": "user", "content": question}], "test/source", truth)
    empty = np.zeros(0)
    return Trajectory(
        prompt=prompt,
        tokens=empty.astype(np.int32),
        loss_mask=empty.astype(np.bool_),
        logprobs=empty.astype(np.float32),
        weight_version=empty.astype(np.int32),
        messages=messages or [*prompt.messages, {"role": "assistant", "content": answer}],
        stop_reason="stop",
        turns=1,
        tool_calls=0,
        seconds=0.0,
        prompt_length=0,
    )


async def judged(cfg, episodes, cache=None):
    judge = Judge(cfg, cache)
    try:
        return await judge.score(episodes)
    finally:
        await judge.close()
