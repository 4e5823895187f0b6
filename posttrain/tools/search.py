"""Search through a retrieval server: the protocol of Search-R1 (arXiv:2503.09516), which verl's SearchTool speaks too.

``POST {"queries": [...], "topk": k, "return_scores": true}`` is answered with ``{"result": [[{"document": {"contents":
...}, "score": ...}, ...], ...]}``, a list of documents for each query, in order.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import httpx
from pydantic import Field

from posttrain.core.http import Endpoint, Unanswered, api_key, http_url
from posttrain.core.types import ToolSchema
from posttrain.tools.base import Tool, ToolResult

PositiveInt = Annotated[int, Field(gt=0)]


class Search(Tool):
    """Asks a retrieval server (the protocol of Search-R1) for documents. All queries of a call are one request.

    Args:
        url: of the server, for example `http://127.0.0.1:8000/retrieve`.
        topk: documents for each query.
        timeout_s: longest wait for one answer of the server; `rollout.tool_deadline_s` covers the whole call, retries
            included.
        retries: after a refused connection, a timeout, HTTP 408, 429 or 5xx: exponential backoff, `Retry-After`
            respected.
        max_concurrent: most requests at once.
        max_queries: most queries of one call.
        format: what the model reads: `text`, the documents as they are; `json`, the same inside `{"result": ...}`, as
            verl sends it.
        api_key_env: environment variable that holds a bearer token; empty: none is sent.
        name: what the model calls the tool.
        description: what the model reads about it.
    """

    def __init__(
        self,
        url: str,
        topk: PositiveInt = 3,
        timeout_s: Annotated[float, Field(gt=0.0)] = 10.0,
        retries: Annotated[int, Field(ge=0)] = 3,
        max_concurrent: PositiveInt = 64,
        max_queries: PositiveInt = 8,
        format: Literal["text", "json"] = "text",
        api_key_env: str = "",
        name: str = "search",
        description: str = "Search for documents that answer a question.",
    ) -> None:
        self.name = name
        self.schema = _schema(name, description, max_queries)
        self._topk, self._max_queries, self._format = topk, max_queries, format
        self._endpoint = Endpoint(
            http_url(url, what="url", example="http://127.0.0.1:8000/retrieve"),
            deadline_s=timeout_s,
            retries=retries,
            concurrency=max_concurrent,
            key=api_key(api_key_env, what="api_key_env"),
        )

    async def call(self, state: Any, arguments: dict[str, Any]) -> ToolResult:
        queries = _queries(arguments)
        if isinstance(queries, str):
            return ToolResult(f"error: {queries}", error=True)
        if len(queries) > self._max_queries:
            return ToolResult(f"error: at most {self._max_queries} queries at once", error=True)
        try:
            response = await self._endpoint.post({"queries": queries, "topk": self._topk, "return_scores": True})
            found = self._documents(response, len(queries))
        except Unanswered as failure:
            return ToolResult(f"error: the search failed: {failure}", error=True)
        text = "\n---\n".join(_list(documents) for documents in found)
        return ToolResult(text if self._format == "text" else json.dumps({"result": text}, ensure_ascii=False))

    async def close(self) -> None:
        await self._endpoint.close()

    def _documents(self, response: httpx.Response, queries: int) -> list[list[str]]:
        """The text of each document, by query. Raises ``Unanswered`` where the answer is not of the protocol."""
        try:
            lists = response.json()["result"]
            if len(lists) != queries:
                raise ValueError(f"{len(lists)} lists of documents for {queries} queries")
            return [[_contents(item) for item in documents[: self._topk]] for documents in lists]
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            excerpt = self._endpoint.excerpt(response.text)
            raise Unanswered(f"{self._endpoint.where}: not an answer of a retrieval server: {excerpt}") from error


def _schema(name: str, description: str, most: int) -> ToolSchema:
    properties = {
        "query": {"type": "string", "description": "What to look for."},
        "query_list": {
            "type": "array",
            "items": {"type": "string"},
            "description": f"Several queries at once, at most {most}, instead of query.",
        },
    }
    parameters = {"type": "object", "properties": properties, "required": []}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def _queries(arguments: dict[str, Any]) -> list[str] | str:
    """The queries of a call, or what is wrong with its arguments."""
    if len(arguments) != 1 or not arguments.keys() <= {"query", "query_list"}:
        return "give one argument, 'query' or 'query_list'"
    (given,) = arguments.values()
    queries = [given] if isinstance(given, str) else given
    if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
        return "'query' must be a string, 'query_list' a list of strings"
    if not queries or not all(query.strip() for query in queries):
        return "a query is empty"
    return queries


def _contents(item: Any) -> str:
    """A document is ``{"document": {...}, "score"}``, or without scores the inner mapping: a title, a line break and a
    text in ``contents``, or the two apart."""
    document = item.get("document", item)
    if "contents" in document:
        return str(document["contents"])
    return f"{document.get('title', '')}\n{document['text']}"


def _list(documents: Sequence[str]) -> str:
    """As the model reads the documents of a query, numbered as in Search-R1."""
    parts = []
    for number, contents in enumerate(documents, start=1):
        title, _, text = contents.partition("\n")
        parts.append(f"Doc {number} (Title: {title})\n{text}")
    return "\n\n".join(parts) or "No results found."
