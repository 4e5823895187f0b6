"""Turns a second that sessions and the endpoint take, with a sampler that answers at once.

    python scripts/bench_endpoint.py [--sessions 64 512 2048] [--turns 1 8 32] [--requests 8000]
    python scripts/bench_endpoint.py --verifiers      the server of verifiers 0.4, in an environment that has it

In process: ``TokenSession.asked`` and ``.sampled``. HTTP: raw requests over kept connections, whose client runs in a
process of its own. A core's second is one of CPU time of the serving process, so that others on the machine matter
little. Memory: what a session of so many turns holds. The peer's server gets the same requests, and its model client
answers at once with a text: it renders and tokenizes nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import time
import tracemalloc
from collections.abc import Sequence
from typing import Any

from posttrain.config import RolloutConfig
from posttrain.core.types import ON_POLICY, Ids, Sample, SamplingParams
from posttrain.data.images import PlacedImage
from posttrain.envs.endpoint import AgentEndpoint
from posttrain.envs.sampling import AgentSession
from posttrain.envs.session import TokenRenderer, TokenSession
from posttrain.models.builtin import builtin_tokenizer
from posttrain.tools.formats import PARSERS

TOKENIZER = builtin_tokenizer("builtin:tiny")
EOS = int(TOKENIZER.eos_token_id)
ANSWER = [*TOKENIZER("The answer is 42, I think.")["input_ids"], EOS]
LIMITS = RolloutConfig(max_turns=100_000, max_prompt_tokens=1_000_000, max_response_tokens=1_000_000)
CONNECTIONS = 16


class AtOnce:
    """Answers at once, always the same."""

    async def generate(self, prompt_ids: Ids, params: SamplingParams, images: Sequence[PlacedImage] = ()) -> Sample:
        return Sample(ANSWER, [-0.5] * len(ANSWER), "stop", 1)


def renderer() -> TokenRenderer:
    return TokenRenderer(TOKENIZER, PARSERS.get("hermes"), frozenset({EOS}))


def messages_of(turn: int) -> list[dict[str, Any]]:
    """Return the messages of the request that asks for a turn, from 0 on."""
    said = {"role": "assistant", "content": "The answer is 42, I think."}
    asked = [{"role": "user", "content": f"Question {i}: what is it?"} for i in range(turn + 1)]
    return [message for question in asked[:-1] for message in (question, said)] + asked[-1:]


def in_process(sessions: int, turns: int, shared: TokenRenderer) -> tuple[float, float]:
    """Return turns a second, and KiB a session."""
    requests = [messages_of(turn) for turn in range(turns)]
    sample = Sample(ANSWER, [-0.5] * len(ANSWER), "stop", 1)
    opened = [TokenSession(shared) for _ in range(sessions)]
    begun = time.process_time()
    for messages in requests:
        for session in opened:
            session.sampled(session.asked(messages), [sample])
    seconds = time.process_time() - begun
    assert all(len(session.branches) == 1 and not session.unmatched for session in opened)
    tracemalloc.start()
    measured = [TokenSession(shared) for _ in range(8)]
    for messages in requests:
        for session in measured:
            session.sampled(session.asked(messages), [sample])
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return sessions * turns / seconds, held / len(measured) / 1024


async def _client(port: int, tokens: Sequence[str], turns: int) -> float:
    """Play all sessions turn by turn. Returns the seconds that it took."""
    bodies = [json.dumps({"model": "policy", "messages": messages_of(turn)}).encode() for turn in range(turns)]

    async def play(mine: Sequence[str]) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for body in bodies:
            for token in mine:
                head = (
                    f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n"
                    f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
                )
                writer.write(head.encode() + body)
                answer = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                assert answer.startswith("http/1.1 200"), answer
                await reader.readexactly(int(answer.partition("content-length:")[2].split("\r\n")[0]))
        writer.close()

    begun = time.perf_counter()
    await asyncio.gather(*(play(tokens[i::CONNECTIONS]) for i in range(min(CONNECTIONS, len(tokens)))))
    return time.perf_counter() - begun


def clients(pipe: Any, port: int, tokens: Sequence[str], turns: int) -> None:
    pipe.send(asyncio.run(_client(port, tokens, turns)))


async def http(sessions: int, turns: int, shared: TokenRenderer) -> tuple[float, float]:
    """Return requests a second of wall time, and of the server's CPU time."""
    async with AgentEndpoint() as endpoint:
        opened = [AgentSession(TokenSession(shared), AtOnce(), LIMITS, ON_POLICY) for _ in range(sessions)]
        tokens = [endpoint.open(session) for session in opened]
        seconds, cpu = await asked_by_a_process(endpoint.port, tokens, turns)
    assert all(s.session.turns == turns and len(s.session.branches) == 1 for s in opened)
    return sessions * turns / seconds, sessions * turns / cpu


async def verifiers(sessions: int, turns: int) -> float:
    """Return requests a second of CPU time that the interception server of verifiers takes."""
    from verifiers.v1.clients import Client, EvalClientConfig, ModelContext
    from verifiers.v1.configs.agent import AgentConfig
    from verifiers.v1.interception.server import InterceptionServer
    from verifiers.v1.session import RolloutSession
    from verifiers.v1.task import TaskData
    from verifiers.v1.trace import AgentInfo, Trace, TraceTask

    class TextAtOnce(Client):  # type: ignore[misc]
        async def get_response(self, dialect: Any, *args: Any, **kwargs: Any) -> Any:
            message = {"role": "assistant", "content": "The answer is 42, I think."}
            raw = {
                "id": "x", "object": "chat.completion", "created": 1, "model": "policy",
                "choices": [{"index": 0, "finish_reason": "stop", "message": message}],
                "usage": {"prompt_tokens": 9, "completion_tokens": 9, "total_tokens": 18},
            }  # fmt: skip
            response = dialect.parse_response(dialect.validate_response(raw))
            response.raw = raw
            return response

    async with InterceptionServer() as server:
        model = TextAtOnce()
        server._client = lambda config: model
        tokens = []
        for i in range(sessions):
            task = TraceTask(type="Task", data=TaskData(idx=i, prompt=messages_of(0)[0]["content"]))
            trace = Trace(task=task, agent=AgentInfo(config=AgentConfig()))
            context = ModelContext(model="policy", client=EvalClientConfig(base_url="http://127.0.0.1:1"))
            tokens.append(server.register(RolloutSession(ctx=context, trace=trace))[0])
        _, cpu = await asked_by_a_process(server.port, tokens, turns)
        assert all(len(session.trace.calls) == turns for session in server.sessions.values())
    return sessions * turns / cpu


async def asked_by_a_process(port: int, tokens: Sequence[str], turns: int) -> tuple[float, float]:
    """Return the seconds of wall time, and of this process's CPU time, that all requests take."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=clients, args=(theirs, port, tokens, turns))
    process.start()
    cpu = time.process_time()
    seconds = float(await asyncio.to_thread(ours.recv))
    cpu = time.process_time() - cpu
    process.join()
    return seconds, cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, nargs="+", default=[64, 512, 2048])
    parser.add_argument("--turns", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--requests", type=int, default=8000, help="most requests of one measurement")
    parser.add_argument("--verifiers", action="store_true", help="measure the server of verifiers instead")
    args = parser.parse_args()
    sizes = [(s, t) for s in args.sessions for t in args.turns if t == 1 or s * t <= args.requests]
    if args.verifiers:
        for sessions, turns in sizes:
            rate = asyncio.run(verifiers(sessions, turns))
            print(f"{sessions:8}  {turns:5}  {rate:9,.0f} requests/s of a core", flush=True)
        return
    shared = renderer()
    in_process(8, 2, shared)  # the template is compiled, imports are done
    print("sessions  turns  in process: turns/s  KiB a session   HTTP: requests/s  of a core")
    for sessions, turns in sizes:
        rate, held = in_process(sessions, turns, shared)
        wall, core = asyncio.run(http(sessions, turns, shared))
        print(f"{sessions:8}  {turns:5}  {rate:19,.0f}  {held:13.1f}  {wall:17,.0f}  {core:9,.0f}", flush=True)


if __name__ == "__main__":
    main()
