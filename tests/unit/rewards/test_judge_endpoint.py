"""The judge when its endpoint fails, hangs or is slow, and the cache of its answers."""

import asyncio
import sqlite3
import threading
import time
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from posttrain.core.errors import RunError
from posttrain.core.types import Score
from posttrain.rewards.judge import Judge
from tests.helpers.chat_endpoint import PROMPT, completion, config, episode, judged, local_and_quick, serving


@pytest.fixture(autouse=True)
def _local_and_quick(monkeypatch):
    local_and_quick(monkeypatch)


# ---------------------------------------------------------------------- failures of the endpoint


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503])
async def test_a_passing_failure_is_tried_again(status):
    def reply(nth, prompt):
        return completion("Score: 6") if nth == 3 else (status, {}, "not now")

    with serving(reply) as endpoint:
        (score,) = await judged(config(endpoint, retries=2), [episode()])
        assert len(endpoint.requests) == 3
    assert score.score == 0.6
    # The second wait is longer than the first can be: 0.5 to 1 times 0.02 s, then 0.04 s.
    first, second = np.diff(endpoint.times)
    assert first >= 0.01
    assert second >= 0.02


async def test_retries_end():
    with serving(lambda *_: (503, {}, "overloaded\n\n" + "x" * 5000)) as endpoint:
        (score,) = await judged(config(endpoint, retries=2), [episode()])
        assert len(endpoint.requests) == 3
    assert score.error.startswith(f"{endpoint.url}/chat/completions: HTTP 503: overloaded xxx")
    assert score.error.endswith("(attempt 3 of 3)")
    assert len(score.error) < 400


@pytest.mark.parametrize("status", [400, 401, 404, 422, 307])
async def test_other_refusals_are_final(status):
    with serving(lambda *_: (status, {}, '{"error": "no such model"}')) as endpoint:
        (score,) = await judged(config(endpoint), [episode()])
        assert len(endpoint.requests) == 1
    assert score.error == f'{endpoint.url}/chat/completions: HTTP {status}: {{"error": "no such model"}}'


@pytest.mark.parametrize("form", ["seconds", "date"])
async def test_retry_after_is_respected(form):
    def reply(nth, prompt):
        if nth > 1:
            return completion("Score: 8")
        # A date has whole seconds: this one is 1 to 2 s away.
        return 429, {"Retry-After": "0.4" if form == "seconds" else formatdate(time.time() + 2, usegmt=True)}, "slow"

    with serving(reply) as endpoint:
        (score,) = await judged(config(endpoint), [episode()])
    assert score.score == 0.8
    waited = endpoint.times[1] - endpoint.times[0]
    assert waited >= (0.4 if form == "seconds" else 0.9)


async def test_a_pause_of_an_hour_is_not_waited_for():
    with serving(lambda *_: (429, {"Retry-After": "3600"}, "quota used up")) as endpoint:
        started = time.monotonic()
        (score,) = await judged(config(endpoint), [episode()])
    assert time.monotonic() - started < 25
    assert "quota used up (it asks for a pause of 3600 s)" in score.error


@pytest.mark.parametrize("value", ["soon", "", "-5", "nan", "Mon, 01 Jan 2001 00:00:00 GMT"])
async def test_an_odd_retry_after_is_no_pause(value):
    def reply(nth, prompt):
        return completion("Score: 8") if nth > 1 else (429, {"Retry-After": value}, "")

    with serving(reply) as endpoint:
        started = time.monotonic()
        (score,) = await judged(config(endpoint), [episode()])
    assert score.score == 0.8
    assert time.monotonic() - started < 25


async def test_an_endpoint_that_hangs_costs_its_deadline_only():
    def reply(nth, prompt):
        if prompt.endswith("hang"):
            endpoint.released.wait(30)
        return completion("Score: 9")

    with serving(reply) as endpoint:
        started = time.monotonic()
        scores = await judged(config(endpoint, deadline_s=0.8, retries=1), [episode("hang"), episode("go")])
        assert 1.6 <= time.monotonic() - started < 25
        assert endpoint.prompts.count("What is 2 + 2?|4|hang") == 2
    assert scores[0].error.endswith("no answer within 0.8 s (attempt 2 of 2)")
    assert scores[1].score == 0.9


async def test_an_answer_that_trickles_has_the_same_deadline():
    """Each byte comes in time; the whole does not."""

    class Trickle(BaseHTTPRequestHandler):
        def do_POST(self):
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            for _ in range(1000):
                self.wfile.write(b" ")
                time.sleep(0.05)

        def log_message(self, *_):
            """Quiet."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_):
            """The client hangs up."""

    server = Server(("127.0.0.1", 0), Trickle)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        url = f"http://127.0.0.1:{server.server_port}"
        started = time.monotonic()
        (score,) = await judged(config(url, deadline_s=0.4, retries=0), [episode()])
        assert time.monotonic() - started < 25
        assert score.error.endswith("no answer within 0.4 s")
    finally:
        server.shutdown()
        server.server_close()


async def test_nobody_listens():
    with serving(lambda *_: completion("")) as endpoint:
        pass
    (score,) = await judged(config(endpoint, retries=1), [episode()])
    assert "ConnectError" in score.error
    assert "attempt 2 of 2" in score.error


async def test_never_more_than_the_limit_at_once_and_as_many_where_there_is_work():
    def reply(nth, prompt):
        time.sleep(0.05)
        return completion("Score: 1")

    with serving(reply) as endpoint:
        scores = await judged(config(endpoint, concurrency=3), [episode(str(i)) for i in range(12)])
    assert all(s.error is None for s in scores)
    assert endpoint.most_at_once == 3


async def test_more_at_once_than_a_client_allows_by_default():
    """httpx opens 100 connections unless told otherwise."""
    everybody = threading.Barrier(120)

    def reply(nth, prompt):
        everybody.wait(20)
        return completion("Score: 1")

    with serving(reply) as endpoint:
        scores = await judged(config(endpoint, concurrency=120, deadline_s=25), [episode(str(i)) for i in range(120)])
    assert all(s.error is None for s in scores)
    assert endpoint.most_at_once == 120


# ---------------------------------------------------------------------- the cache


async def test_identical_texts_are_asked_once():
    def reply(nth, prompt):
        time.sleep(0.1)
        return completion(f"Score: {nth}")

    with serving(reply) as endpoint:
        judge = Judge(config(endpoint), None)
        first = await judge.score([episode("same")] * 20 + [episode("other")])
        again = await judge.score([episode("same")])
        await judge.close()
        assert len(endpoint.requests) == 2
    assert len({s.score for s in first[:20]}) == 1
    assert again == first[:1]


async def test_without_a_cache_every_episode_is_asked_for():
    with serving(lambda *_: completion("Score: 1")) as endpoint:
        await judged(config(endpoint, cache=False), [episode("same")] * 5)
        assert len(endpoint.requests) == 5


async def test_answers_survive_and_failures_do_not(tmp_path):
    cache = tmp_path / "new" / "judge.sqlite"

    def reply(nth, prompt):
        if prompt.endswith("bad") and len(endpoint.requests) < 4:
            return (400, {}, "no") if nth % 2 else completion("who knows")
        return completion("Score: 4")

    with serving(reply) as endpoint:
        assert [s.error is None for s in await judged(config(endpoint), [episode("bad")], cache)] == [False]
        assert [s.error is None for s in await judged(config(endpoint), [episode("bad")], cache)] == [False]
        with sqlite3.connect(cache) as db:
            assert db.execute("SELECT count(*) FROM answers").fetchone() == (0,)
        assert [s.score for s in await judged(config(endpoint), [episode("good")], cache)] == [0.4]
        assert len(endpoint.requests) == 3
        scores = await judged(config(endpoint), [episode("good"), episode("bad")], cache)
        assert [s.score for s in scores] == [0.4, 0.4]
        assert len(endpoint.requests) == 4
        # Another scale is another score of the same answer; another model, temperature or text another question.
        assert (await judged(config(endpoint, scale=8.0), [episode("good")], cache))[0].score == 0.5
        assert len(endpoint.requests) == 4
        for changes in ({"model": "judge-2"}, {"temperature": 0.5}, {"prompt": "other: " + PROMPT}):
            await judged(config(endpoint, **changes), [episode("good")], cache)
        assert len(endpoint.requests) == 7


async def test_an_answer_that_a_new_pattern_cannot_read_is_asked_for_again(tmp_path):
    with serving(lambda nth, _: completion("Score: 4" if nth == 1 else "Grade: 2")) as endpoint:
        cache = tmp_path / "judge.sqlite"
        await judged(config(endpoint), [episode()], cache)
        (score,) = await judged(config(endpoint, pattern=r"Grade: (\d)"), [episode()], cache)
        assert score.score == 0.2
        await judged(config(endpoint, pattern=r"Grade: (\d)"), [episode()], cache)
        assert len(endpoint.requests) == 2


async def test_several_judges_share_a_file(tmp_path):
    cache = tmp_path / "judge.sqlite"
    with serving(lambda nth, prompt: completion(f"Score: {prompt[-1]}")) as endpoint:
        judges = [Judge(config(endpoint), cache) for _ in range(4)]
        episodes = [episode(str(i)) for i in range(60)]
        results = await asyncio.gather(*(j.score(episodes) for j in judges))
        for judge in judges:
            await judge.close()
        asked = len(endpoint.requests)
        assert await judged(config(endpoint), episodes, cache) == results[0]
        assert len(endpoint.requests) == asked
    assert results == [[Score(int(str(i)[-1]) / 10, False, str(i)[-1]) for i in range(60)]] * 4
    with sqlite3.connect(cache) as db:
        assert db.execute("SELECT count(*) FROM answers").fetchone() == (60,)


async def test_a_cache_that_cannot_be_used_is_said_so(tmp_path):
    with serving(lambda *_: completion("Score: 1")) as endpoint:
        junk = tmp_path / "junk.sqlite"
        junk.write_bytes(b"no database at all" * 100)
        with pytest.raises(RunError, match=r"the judge's cache .*junk\.sqlite cannot be used") as error:
            Judge(config(endpoint), junk)
        assert "reward.judge.cache = false" in error.value.hint
        file = tmp_path / "judge.sqlite"
        judge = Judge(config(endpoint), file)
        with sqlite3.connect(file) as db:
            db.execute("DROP TABLE answers")
        with pytest.raises(RunError, match="no such table"):
            await judge.score([episode()])
        await judge.close()


async def test_who_gives_up_leaves_the_others_their_answer():
    def reply(nth, prompt):
        endpoint.released.wait(10)
        return completion("Score: 3")

    with serving(reply) as endpoint:
        judge = Judge(config(endpoint, deadline_s=20), None)
        first, second = (asyncio.create_task(judge.score([episode()])) for _ in range(2))
        while not endpoint.requests:
            await asyncio.sleep(0.01)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        endpoint.released.set()
        assert [s.score for s in await asyncio.wait_for(second, 5)] == [0.3]
        assert len(endpoint.requests) == 1
        await judge.close()


async def test_close_ends_what_is_under_way():
    with serving(lambda *_: (endpoint.released.wait(30), completion("Score: 3"))[1]) as endpoint:
        judge = Judge(config(endpoint, deadline_s=30), None)
        task = asyncio.create_task(judge.score([episode()]))
        while not endpoint.requests:
            await asyncio.sleep(0.01)
        await asyncio.wait_for(judge.close(), 5)
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, 5)
        await judge.close()
