"""The endpoint: a server on loopback at which agents sample from the engines of a run.

Each episode has a session, whose URL holds a token that nobody can guess. Requests are sampled by the episode's own
sampler, with its limits and deadlines, in the event loop of the rollouts. A turn is sent when it is complete, in events
where the client asks for a stream: the engines give whole turns.
"""

from __future__ import annotations

import asyncio
import json
import math
import secrets
import socket
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from posttrain.core.errors import DataError, PosttrainError, RunError
from posttrain.core.plugins import described, number_of
from posttrain.envs.anthropic_wire import MessagesWire
from posttrain.envs.openai_wire import ChatWire, ResponsesWire
from posttrain.envs.sampling import AgentSession
from posttrain.envs.wire import Answers, Refused, Wire

MOST_BYTES = 8 << 20
"""Longest request. A longer one fails its episode."""
MOST_REQUESTS = 256
"""Most requests of one session at once. One more fails its episode."""
_START_S = 30.0
_TOKEN_BYTES = 24
_GONE = "the client disconnected amid a request"

_WIRES: Mapping[str, Wire] = {
    "chat/completions": ChatWire(),
    "responses": ResponsesWire(),
    "messages": MessagesWire(),
}


class AgentEndpoint:
    """The server. A context manager: at its end all sessions are closed."""

    def __init__(self) -> None:
        self._sessions: dict[str, AgentSession] = {}
        routes = [
            *(
                Route(f"{prefix}/v1/{path}", self._handler(wire), methods=["POST"])
                for prefix in ("", "/{token}")
                for path, wire in _WIRES.items()
            ),
            *(Route(f"{prefix}/v1/models", self._models) for prefix in ("", "/{token}")),
            *(Route(f"{prefix}/reward", self._reward, methods=["POST"]) for prefix in ("", "/{token}")),
        ]
        self._app = Starlette(routes=routes, exception_handlers={HTTPException: _unknown_path})
        self._server: _Server | None = None
        self._task: asyncio.Task[None] | None = None
        self.port = 0

    def open(self, session: AgentSession) -> str:
        """Begin to serve a session. Returns its token."""
        token = secrets.token_urlsafe(_TOKEN_BYTES)
        self._sessions[token] = session
        return token

    def close(self, token: str) -> None:
        """End a session with all its requests. Idempotent."""
        if (session := self._sessions.pop(token, None)) is not None:
            session.close()

    def url(self, token: str) -> str:
        """Return the base URL of a session: Anthropic's as it is, OpenAI's with ``/v1`` behind it."""
        return f"http://127.0.0.1:{self.port}/{token}"

    async def __aenter__(self) -> Self:
        """Raises ``RunError`` where no port can be had."""
        try:
            # By name: asyncio sends without delay (TCP_NODELAY) only where the socket says that it is one of TCP.
            listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
            listener.bind(("127.0.0.1", 0))
            listener.listen(2048)
        except OSError as error:
            raise RunError(f"the endpoint of agents cannot listen on 127.0.0.1: {error}") from error
        self.port = listener.getsockname()[1]
        server = self._server = _Server(
            uvicorn.Config(
                self._app, log_config=None, access_log=False, lifespan="off", ws="none", timeout_graceful_shutdown=1
            )
        )
        self._task = asyncio.create_task(server.serve([listener]))
        try:
            async with asyncio.timeout(_START_S):
                while not server.started:
                    if self._task.done():
                        raise RunError(f"the endpoint of agents did not start: {self._task.exception()}")
                    await asyncio.sleep(0.01)
        except TimeoutError as error:
            raise RunError(f"the endpoint of agents did not start within {_START_S:g} s") from error
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        for token in list(self._sessions):
            self.close(token)
        if self._server is not None and self._task is not None:
            self._server.should_exit = True
            await asyncio.wait([self._task], timeout=_START_S)
            self._task.cancel()

    # ------------------------------------------------------------------ requests

    def _handler(self, wire: Wire) -> Any:
        async def handle(http: HttpRequest) -> Response:
            try:
                session = self._session_of(http)
            except Refused as refused:
                return _refusal(wire, refused)
            try:
                with session.working(MOST_REQUESTS):
                    body = await _body(http)
                    request = _read(wire, body)
                    answers = await _unless_gone(http, session.answer(request))
                return _answered(wire, body, answers)
            except Refused as refused:
                if refused.fatal:
                    session.fail(refused.message)
                return _refusal(wire, refused)
            except ClientDisconnect:
                session.fail(_GONE)
                return Response(status_code=499)
            except DataError as error:
                return _refusal(wire, Refused(400, error.message))
            except PosttrainError as error:
                session.fail(f"{type(error).__name__}: {error.message}")
                return _refusal(wire, Refused(500, error.message, code="api_error"))
            except asyncio.CancelledError:
                if not session.closed:
                    raise
                return _refusal(wire, Refused(404, "the session is over", code="not_found_error"))
            except Exception as error:  # clients would ask again, and the episode would not tell why
                failed = f"the endpoint failed over a request: {described(error)}"
                session.fail(failed)
                return _refusal(wire, Refused(500, failed, code="api_error"))

        return handle

    async def _models(self, http: HttpRequest) -> Response:
        try:
            self._session_of(http)
        except Refused as refused:
            return _refusal(_WIRES["chat/completions"], refused)
        return JSONResponse({"object": "list", "data": [{"id": "policy", "object": "model", "owned_by": "posttrain"}]})

    async def _reward(self, http: HttpRequest) -> Response:
        wire = _WIRES["chat/completions"]
        try:
            session = self._session_of(http)
            with session.working(MOST_REQUESTS):
                reward = (await _body(http)).get("reward")
            number = number_of(reward) if isinstance(reward, int | float) and not isinstance(reward, bool) else None
            if number is None or not math.isfinite(number):
                raise Refused(400, "the body has no finite number as 'reward'")
        except Refused as refused:
            return _refusal(wire, refused)
        session.reward = number
        return JSONResponse({"reward": session.reward})

    def _session_of(self, http: HttpRequest) -> AgentSession:
        """Return the session of the token in the URL, else of the API key. Raises ``Refused``."""
        key = http.headers.get("x-api-key") or http.headers.get("authorization", "").removeprefix("Bearer ")
        token = http.path_params.get("token") or key
        if (session := self._sessions.get(token)) is None:
            raise Refused(404, "there is no such session, or it is over", code="not_found_error")
        return session


class _Server(uvicorn.Server):
    """A server that leaves signals to the run."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _body(http: HttpRequest) -> dict[str, Any]:
    """Return the body of a request. One that is too long is read to its end all the same, and thrown away: a client
    that still writes reads no answer. Raises ``Refused``."""
    parts: list[bytes] = []
    length = 0
    async for part in http.stream():
        length += len(part)
        if length <= MOST_BYTES:
            parts.append(part)
    if length > MOST_BYTES:
        raise Refused(413, f"a request of {length:,} bytes; at most {MOST_BYTES:,} are read", fatal=True)
    try:
        body = json.loads(b"".join(parts))
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"a request that is not JSON: {error}", fatal=True) from error
    if not isinstance(body, dict):
        raise Refused(400, "a request that is no JSON object", fatal=True)
    return body


def _read(wire: Wire, body: Mapping[str, Any]) -> Any:
    try:
        return wire.request(body)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        said = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise Refused(400, f"a request of another shape: {said}") from error


async def _unless_gone(http: HttpRequest, work: Coroutine[Any, Any, Any]) -> Any:
    """Return what ``work`` gives. Raises ``Refused`` where the client goes first; ``work`` is then cancelled."""

    async def gone() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    task, left = asyncio.create_task(work), asyncio.create_task(gone())
    try:
        await asyncio.wait([task, left], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise Refused(499, _GONE, fatal=True)
    finally:
        task.cancel()
        left.cancel()
        await asyncio.gather(task, left, return_exceptions=True)


def _answered(wire: Wire, body: Mapping[str, Any], answers: Answers) -> Response:
    name = secrets.token_hex(12)
    if not body.get("stream"):
        return JSONResponse(wire.response(body, answers, name))
    events = list(wire.events(body, answers, name))  # all of them, before the answer begins: one might raise
    return StreamingResponse(_sent(events), media_type="text/event-stream")


async def _sent(events: Iterable[str]) -> AsyncIterator[str]:
    for one in events:
        yield one


def _refusal(wire: Wire, refused: Refused) -> Response:
    # OpenAI's clients would ask again, to no other end.
    return JSONResponse(wire.error(refused), refused.status, headers={"x-should-retry": "false"})


async def _unknown_path(http: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    served = ", ".join(f"/v1/{path}" for path in _WIRES)
    return JSONResponse({"error": {"message": f"{error.detail}; served are POST {served}"}}, error.status_code)
