"""The search tool against a real server on this machine that speaks the protocol, fails, hangs and is slow."""

import asyncio
import json
import time

import pytest

from posttrain.core.errors import ConfigError
from posttrain.tools.search import Search
from posttrain.tools.sets import open_tools
from tests.helpers.chat_endpoint import local_and_quick, serving

KEY = "sk-very-secret-0123456789"


@pytest.fixture(autouse=True)
def _local_and_quick(monkeypatch):
    local_and_quick(monkeypatch)


def whole(body):
    return body


def found(nth, body):
    """Two documents a query, as the servers of Search-R1 write them."""
    result = [
        [{"document": {"id": i, "contents": f'"{query}"\nabout {query} {i}'}, "score": 1.0 - i} for i in range(2)]
        for query in body["queries"]
    ]
    return 200, {}, json.dumps({"result": result})


async def search(url, arguments, **options):
    tool = Search(url, **{"timeout_s": 5.0, **options})
    try:
        return await tool.call(await tool.create(None), arguments)
    finally:
        await tool.close()


async def test_one_query():
    with serving(found, whole) as server:
        result = await search(server.url, {"query": "cats"}, topk=5)
    path, headers, body = server.requests[0]
    assert path == "/v1"
    assert "Authorization" not in headers
    assert body == {"queries": ["cats"], "topk": 5, "return_scores": True}
    assert result.text == 'Doc 1 (Title: "cats")\nabout cats 0\n\nDoc 2 (Title: "cats")\nabout cats 1'
    assert not result.error


async def test_several_queries_are_one_request():
    with serving(found, whole) as server:
        result = await search(server.url, {"query_list": ["a", "b"]}, topk=1)
        assert len(server.requests) == 1
    assert result.text == 'Doc 1 (Title: "a")\nabout a 0\n---\nDoc 1 (Title: "b")\nabout b 0'


async def test_as_verl_writes_it():
    with serving(found, whole) as server:
        result = await search(server.url, {"query_list": ["ü"]}, topk=1, format="json")
    assert json.loads(result.text) == {"result": 'Doc 1 (Title: "ü")\nabout ü 0'}


@pytest.mark.parametrize(
    ("documents", "text"),
    [
        ([{"contents": "T\nx"}], "Doc 1 (Title: T)\nx"),
        ([{"document": {"title": "T", "text": "x"}, "score": 1}], "Doc 1 (Title: T)\nx"),
        ([{"document": {"text": "x"}}], "Doc 1 (Title: )\nx"),
        ([{"document": {"contents": "only a title"}}], "Doc 1 (Title: only a title)\n"),
        ([], "No results found."),
    ],
)
async def test_shapes_of_documents(documents, text):
    with serving(lambda *_: (200, {}, json.dumps({"result": [documents]})), whole) as server:
        assert (await search(server.url, {"query": "q"})).text == text


@pytest.mark.parametrize(
    "body",
    [
        "<html>it works</html>",
        "[]",
        '{"results": []}',
        '{"result": []}',
        '{"result": [[], []]}',
        '{"result": [null]}',
        '{"result": ["text"]}',
        '{"result": [[{"document": "text"}]]}',
        '{"result": [[{"document": {"body": "x"}}]]}',
        '{"result": 3}',
    ],
)
async def test_an_answer_of_another_protocol_is_an_error(body):
    with serving(lambda *_: (200, {}, body), whole) as server:
        result = await search(server.url, {"query": "q"})
        assert len(server.requests) == 1
    assert result.error
    assert result.text.startswith(f"error: the search failed: {server.url}: not an answer of a retrieval server: ")


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({}, "give one argument"),
        ({"query": "a", "query_list": ["b"]}, "give one argument"),
        ({"question": "a"}, "give one argument"),
        ({"query": 3}, "must be a string"),
        ({"query_list": ["a", 3]}, "list of strings"),
        ({"query_list": {}}, "list of strings"),
        ({"query_list": []}, "empty"),
        ({"query": " "}, "empty"),
        ({"query_list": ["a"] * 9}, "at most 8 queries"),
    ],
)
async def test_wrong_arguments_never_reach_the_server(arguments, why):
    with serving(found, whole) as server:
        result = await search(server.url, arguments)
        assert server.requests == []
    assert result.error
    assert why in result.text


async def test_a_passing_failure_is_tried_again_and_a_lasting_one_is_told():
    with serving(lambda nth, body: found(nth, body) if nth == 3 else (503, {}, "busy"), whole) as server:
        assert not (await search(server.url, {"query": "q"}, retries=2)).error
        assert len(server.requests) == 3
    with serving(lambda *_: (500, {}, "down"), whole) as server:
        result = await search(server.url, {"query": "q"}, retries=1)
        assert len(server.requests) == 2
    assert result.text == f"error: the search failed: {server.url}: HTTP 500: down (attempt 2 of 2)"


async def test_a_server_that_hangs_costs_its_deadline_only():
    with serving(lambda *_: (server.released.wait(30), (200, {}, ""))[1], whole) as server:
        started = time.monotonic()
        result = await search(server.url, {"query": "q"}, timeout_s=0.3, retries=0)
        assert time.monotonic() - started < 25
    assert result.text.endswith("no answer within 0.3 s")


async def test_nobody_listens():
    with serving(found, whole) as server:
        pass
    assert "ConnectError" in (await search(server.url, {"query": "q"}, retries=0)).text


async def test_never_more_than_the_limit_at_once():
    def slow(nth, body):
        time.sleep(0.03)
        return found(nth, body)

    with serving(slow, whole) as server:
        tool = Search(server.url, max_concurrent=3)
        results = await asyncio.gather(*(tool.call(None, {"query": str(i)}) for i in range(12)))
        await tool.close()
    assert server.most_at_once == 3
    assert [f"about {i} 0" in result.text for i, result in enumerate(results)] == [True] * 12


async def test_the_key_is_sent_and_not_shown(monkeypatch):
    monkeypatch.setenv("SEARCH_KEY", KEY)
    with serving(lambda *_: (401, {}, f"bad key {KEY}"), whole) as server:
        result = await search(server.url, {"query": "q"}, api_key_env="SEARCH_KEY")
    assert server.requests[0][1]["Authorization"] == f"Bearer {KEY}"
    assert "bad key ***" in result.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "option 'url' is missing"),
        ({"url": "127.0.0.1:8000"}, "url = '127.0.0.1:8000' is not an http or https URL|url is not a URL"),
        ({"url": f"http://me:{KEY}@host/"}, "url holds a user or password"),
        ({"url": "http://host/", "topk": 0}, "topk = 0: Input should be greater than 0"),
        ({"url": "http://host/", "topk": "3"}, "topk = '3': Input should be a valid integer"),
        ({"url": "http://host/", "format": "xml"}, "format = 'xml': Input should be 'text' or 'json'"),
        ({"url": "http://host/", "top_k": 3}, "unknown option 'top_k'"),
        ({"url": "http://host/", "api_key_env": "NO_SUCH_KEY"}, r"api_key_env: \$NO_SUCH_KEY is not set"),
    ],
)
def test_options_that_cannot_work_are_refused(options, message):
    with pytest.raises(ConfigError, match=r"^\[tools.wiki\]: (" + message + ")") as error:
        open_tools(["wiki"], {"wiki": {"type": "search", **options}})
    assert KEY not in str(error.value)


def test_two_searches_have_two_names():
    wiki = {"type": "search", "url": "http://127.0.0.1:1/a", "name": "wiki", "description": "Encyclopedia."}
    web = {"type": "search", "url": "http://127.0.0.1:1/b"}
    tools = open_tools(["wiki", "web"], {"wiki": wiki, "web": web})
    assert list(tools) == ["wiki", "search"]
    assert tools["wiki"].schema["function"]["name"] == "wiki"
    assert tools["wiki"].schema["function"]["description"] == "Encyclopedia."


def test_it_may_be_made_before_the_loop_runs():
    with serving(found, whole) as server:
        tool = Search(server.url, max_concurrent=1)

        async def use():
            try:
                return await asyncio.gather(*(tool.call(None, {"query": q}) for q in "ab"))
            finally:
                await tool.close()

        assert [result.error for result in asyncio.run(use())] == [False, False]
