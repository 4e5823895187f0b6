"""The code interpreter, with programs that really run: what the model reads, limits, concurrency, cancellation."""

import asyncio
import inspect
import json
import re
import time
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from posttrain import sandbox
from posttrain.config import SandboxConfig
from posttrain.core.errors import ConfigError
from posttrain.core.types import Prompt
from posttrain.sandbox import SandboxError
from posttrain.tools import TOOLS
from posttrain.tools.base import cut
from posttrain.tools.code import SCHEMA, CodeInterpreter, useful_lines, without_fence
from tests.unit.sandbox.test_remote_sandbox import service  # noqa: F401  (a fixture)
from tests.unit.sandbox.test_sandbox import REASON

pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))
PROMPT = Prompt(0, [{"role": "user", "content": "q"}], "openai/gsm8k", "8")


@pytest.fixture(autouse=True)
def usual_sandbox():
    sandbox.configure(SandboxConfig(deadline_s=5.0))
    yield
    sandbox.configure(SandboxConfig())


@asynccontextmanager
async def opened(**options):
    tool = CodeInterpreter(**options)
    try:
        yield tool
    finally:
        await tool.close()


@asynccontextmanager
async def episode(tool):
    """``say(code)`` of one episode: the result of a call."""
    state = await tool.create(PROMPT)
    try:
        yield lambda code: tool.call(state, {"code": code})
    finally:
        await tool.release(state)


def processes(tool):
    """Launchers of the sandboxes that a tool has open."""
    return [s._process.pid for s in tool._pool._open if s._process is not None]


async def test_what_the_model_reads():
    async with opened() as tool, episode(tool) as say:
        cases = {
            "print(12 - 5 + 8)": ("15", False),
            "x = 3\nx ** 4": ("81", False),
            "print('a')\n'b'": ("a\n'b'", False),
            "print('  indented')": ("  indented", False),
            "x = 1": ("(no output)", False),
            "print()": ("(no output)", False),
            "import sys; print('out'); print('warned', file=sys.stderr)": ("out\nwarned", False),
            "import os; os._exit(3)": ("error: exit code 3", True),
            "import os; os.kill(os.getpid(), 9)": ("error: killed by SIGKILL", True),
            "```python\nprint(1)\n```": ("1", False),
            "import sys; sys.exit('bad')": ("bad", True),
        }
        for code, (text, error) in cases.items():
            result = await say(code)
            assert (result.text, result.error) == (text, error), code
        traceback = (await say("x = 1\nx / 0")).text.splitlines()
        assert traceback[:2] == [
            "Traceback (most recent call last):",
            '  File "/sandbox/main.py", line 2, in <module>',
        ]
        assert traceback[-1] == "ZeroDivisionError: division by zero"
        assert await tool.reward(None) is None


async def test_limits_in_plain_words():
    sandbox.configure(SandboxConfig(deadline_s=5.0, memory_mb=300))
    many = (
        "import os, time\n"
        "for _ in range(6):\n"
        "    if os.fork() == 0: x = bytearray(b'a') * 100_000_000; time.sleep(60)\n"
        "time.sleep(60)"
    )
    async with opened(timeout_s=0.5) as tool, episode(tool) as say:
        assert (await say("print('began', flush=True)\nwhile True: pass")).text == "began\nerror: stopped after 0.5 s"
        assert "MemoryError" in (await say("bytearray(10 ** 9)")).text
    async with opened() as tool, episode(tool) as say:
        assert (await say(many)).text == "error: killed, because it used too much memory"


@pytest.mark.parametrize("session", [False, True])
async def test_50_mb_of_output_are_cut(session):
    async with opened(session=session, max_output_chars=1000) as tool, episode(tool) as say:
        result = await say("for _ in range(50): print('x' * 1_000_000)")
        assert result.error
        assert len(result.text) < 2500
        assert result.text.startswith("xxx")
        assert result.text.endswith("error: stopped, because it printed too much")
        short = await say("print('a' * 2000)")
        assert short.text == f"{'a' * 500}\n... 1000 characters cut ...\n{'a' * 500}"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({}, "code"),
        ({"code": 5}, "code"),
        ({"code": " \n"}, "code"),
        ({"code": "1", "x": 1}, "'x'"),
        ({"cod": "1"}, "'cod'"),
    ],
)
async def test_wrong_arguments_are_told_to_the_model(arguments, named):
    async with opened() as tool:
        result = await tool.call(await tool.create(PROMPT), arguments)
        assert result.error
        assert result.text.startswith("error: ")
        assert named in result.text


async def test_calls_share_nothing_without_a_session_and_all_with_one():
    async with opened() as tool, episode(tool) as say:
        await say("x = 1")
        assert (await say("x")).text.endswith("NameError: name 'x' is not defined")
    async with opened(session=True) as tool, episode(tool) as say, episode(tool) as other:
        await say("import math\nx = 1")
        await other("x = 7")
        assert (await say("math.floor(1.5) + x")).text == "2"
        assert (await other("x")).text == "7"
        # Calls of one turn run in their order.
        texts = await asyncio.gather(*(say(f"x = x * 10 + {n}\nx") for n in range(5)))
        assert [r.text for r in texts] == ["10", "101", "1012", "10123", "101234"]


async def test_a_session_that_ends_is_told_and_started_again():
    gone = "error: the session was restarted: variables, functions and imports of earlier calls are gone"
    async with opened(session=True, timeout_s=0.5) as tool, episode(tool) as say:
        await say("x = 1")
        stopped = await say("while True: pass")
        assert stopped.text.endswith("KeyboardInterrupt\nerror: stopped after 0.5 s")
        assert (await say("x")).text == "1"
        assert (await say("import os; os._exit(1)")).text == f"error: exit code 1\n{gone}"
        assert "NameError" in (await say("x")).text


async def test_sessions_begin_with_a_call_and_end_with_the_episode():
    async with opened(session=True, max_concurrent=1) as tool:
        state = await tool.create(PROMPT)
        assert processes(tool) == []
        await tool.call(state, {"code": "import os, time\nif os.fork() == 0:\n  os.setsid(); time.sleep(100)"})
        (launcher,) = processes(tool)
        await tool.release(state)
        # The slot is warm for the next episode, and nothing of this one is in it.
        async with episode(tool) as say, episode(tool) as other:
            alive = (
                "import os\n"
                "for p in range(2, 99):\n"
                "    try: os.kill(p, 0); print('' if p == os.getpid() else p)\n"
                "    except OSError: pass"
            )
            assert (await say(alive)).text == "(no output)"
            await other("1")
            assert len(processes(tool)) == 2
        assert len(processes(tool)) == 1
    assert not Path(f"/proc/{launcher}").exists()


async def test_episodes_wait_for_a_session():
    async with opened(session=True, max_sessions=1) as tool:
        first = await tool.create(PROMPT)
        second = asyncio.create_task(tool.create(PROMPT))
        await asyncio.sleep(0.1)
        assert not second.done()
        await tool.release(first)
        await tool.release(await asyncio.wait_for(second, 5.0))


async def test_no_more_programs_than_slots_run_at_once():
    code = "import time; t = time.monotonic(); time.sleep(0.2); print(t, time.monotonic())"
    async with opened(max_concurrent=3) as tool:
        state = await tool.create(PROMPT)
        results = await asyncio.gather(*(tool.call(state, {"code": code}) for _ in range(10)))
        assert not any(r.error for r in results)
        spans = [tuple(map(float, r.text.split())) for r in results]
        assert max(sum(a <= start < b for a, b in spans) for start, _ in spans) <= 3
        assert len(processes(tool)) <= 3


async def test_a_call_that_finds_no_slot_says_so():
    async with opened(max_concurrent=1, wait_s=0.3) as tool, episode(tool) as say:
        await say("1")
        long = asyncio.create_task(say("import time; time.sleep(1.5); print('done')"))
        await asyncio.sleep(0.05)
        busy = await say("print(2)")
        assert busy.error
        assert busy.text == "error: no sandbox was free within 0.3 s; nothing was run"
        assert (await long).text == "done"  # longer than the wait, but it had begun
        assert (await say("print(3)")).text == "3"


@pytest.mark.parametrize("session", [False, True])
async def test_a_cancelled_call_leaves_nothing_running(session):
    async with opened(session=session, max_concurrent=1) as tool, episode(tool) as say:
        assert (await say("x = 1\nprint('warm')")).text == "warm"
        for _ in range(3):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await say("while True: pass")
        started = time.monotonic()
        result = await say("import os; print(os.listdir('.'))")
        assert time.monotonic() - started < 12.0  # not after the deadlines of the three, 5 s each
        *note, text = result.text.splitlines()
        assert text == ("[]" if session else "['main.py']")
        assert [line.startswith("note: before this call the session was restarted") for line in note] == [
            True
        ] * session
        assert (await say("print(2)")).text == "2"


async def test_a_call_that_is_cancelled_while_it_waits_never_runs():
    async with opened(session=True, max_concurrent=1) as tool, episode(tool) as say, episode(tool) as other:
        await other("x = 1")
        long = asyncio.create_task(say("import time; time.sleep(1.0)"))
        await asyncio.sleep(0.05)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await other("x = 2")
        await long
        assert (await other("x")).text == "1"


async def test_a_cell_that_is_given_up_takes_no_sandbox_after_its_session_was_closed():
    async with opened(session=True, max_concurrent=1) as tool:
        session = tool._pool.session()
        await session.run("x = 1")
        with session._using:  # as the thread of a cancelled cell holds it
            closing = asyncio.create_task(session.close())
            cell = asyncio.create_task(session.run("x = 2"))
            await asyncio.sleep(0.1)  # both wait for it, the one that closes first
            cell.cancel()
            await asyncio.wait([cell])
        await closing
        async with asyncio.timeout(20):  # the one sandbox is there for the next session
            assert (await tool._pool.session().run("print(5)")).stdout == "5\n"
        assert session._sandbox is None


async def test_code_that_is_no_utf8_leaves_no_session_to_the_next_episode():
    async with opened(session=True, max_concurrent=1) as tool:
        async with episode(tool) as say:
            await say("secret = 42")
            assert "surrogates not allowed" in (await say("print('\ud83d')")).text
            assert (await say("print(secret)")).text == "42"
        async with episode(tool) as say:
            assert "NameError" in (await say("print(secret)")).text


async def test_closing_ends_what_runs():
    tool = CodeInterpreter(session=True)
    state = await tool.create(PROMPT)
    running = asyncio.create_task(tool.call(state, {"code": "while True: pass"}))
    while not processes(tool):
        await asyncio.sleep(0.05)
    await asyncio.sleep(0.3)
    launchers = processes(tool)
    await tool.close()
    assert "stopped" in (await running).text
    await tool.release(state)
    await tool.close()
    assert launchers
    assert not [p for p in launchers if Path(f"/proc/{p}").exists()]


async def test_a_sandbox_that_fails_is_not_the_programs_fault():
    async with opened(session=True) as tool, episode(tool) as say:
        await say("x = 1")
        (slot,) = tool._pool._open
        slot._process.kill()
        slot._process.wait()
        await asyncio.sleep(0.2)  # what was in it ends with it
        with pytest.raises(SandboxError, match="died"):
            await say("x")
        assert (await say("print(1)")).text.splitlines()[0].startswith("note: before this call the session was")


# ---------------------------------------------------------------------- a remote sandbox


async def test_programs_run_on_a_service(service):  # noqa: F811
    service.requests.clear()
    sandbox.configure(SandboxConfig(mode="remote", url=service.url, deadline_s=3.0))
    tool = CodeInterpreter(timeout_s=0.5)
    tool.check()
    async with episode(tool) as say:
        assert (await say("print('é')\n6 * 7")).text == "é\n42"
        failed = await say("x = 1\ny")
        assert failed.text.splitlines()[-2:] == ["    y", "NameError: name 'y' is not defined"]
        assert "line 2, in <module>" in failed.text
        assert "execute" not in failed.text
        assert (await say("while True: pass")).text == "error: stopped after 0.5 s"
        assert (await say("import sys; sys.exit(4)")).text == "error: exit code 4"
        service.trouble += [(400, b"no")]
        with pytest.raises(SandboxError, match="HTTP 400"):
            await say("1")
    assert {request["run_timeout"] for _, request in service.requests[1:]} == {0.5}
    await tool.close()


def test_a_session_on_a_service_is_refused(service):  # noqa: F811
    sandbox.configure(SandboxConfig(mode="remote", url=service.url))
    with pytest.raises(ConfigError, match=r"session = true needs a local sandbox") as error:
        CodeInterpreter(session=True).check()
    assert "sandbox.mode" in (error.value.hint or "")


@pytest.mark.slow
def test_a_missing_sandbox_is_found_before_a_run():
    sandbox.configure(SandboxConfig(mode="remote", url="http://127.0.0.1:9"))
    with pytest.raises(SandboxError, match="did not answer"):
        CodeInterpreter().check()


# ---------------------------------------------------------------------- options and text


def test_the_tool_is_registered_and_described():
    tool = TOOLS.get("code_interpreter")(function_name="python")
    assert (tool.name, tool.schema["function"]["name"]) == ("python", "python")
    assert SCHEMA["function"]["name"] == CodeInterpreter().name == "code_interpreter"
    assert tool.schema["function"]["parameters"] == SCHEMA["function"]["parameters"]
    json.dumps(tool.schema)


def test_the_options_in_the_docs_are_those_of_the_tool():
    page = (Path(__file__).resolve().parents[3] / "docs" / "code-interpreter.md").read_text(encoding="utf-8")
    documented = inspect.getdoc(CodeInterpreter)
    assert documented is not None
    for name, parameter in inspect.signature(CodeInterpreter).parameters.items():
        default = "none" if parameter.default is None else f"`{json.dumps(parameter.default)}`"
        about = re.search(rf"^    {name}: (.*)$", documented, re.MULTILINE)
        assert about is not None, name
        text = about[1][0].upper() + about[1][1:]
        assert f"| `{name}` | {default} | {text} |" in page


@pytest.mark.parametrize("option", ["timeout_s", "max_output_chars", "max_concurrent", "max_sessions", "wait_s"])
def test_options_must_be_positive(option):
    with pytest.raises(ConfigError, match=f"{option} = 0 is not positive"):
        CodeInterpreter(**{option: 0})


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("print(1)", "print(1)"),
        ("```python\nprint(1)\n```", "print(1)"),
        ("\n```py\na\n\nb\n```\n", "a\n\nb"),
        ("```\nprint(1)\n", "print(1)\n".rstrip()),
        ("```python\nprint(1)\n```\nThis prints 1.", "print(1)"),
        ("```python\nx = '''\n```\n'''\n```", "x = '''\n```\n'''"),
        ("```print(1)```", "print(1)"),
        ("x = '''\n```\n'''", "x = '''\n```\n'''"),
    ],
)
def test_fences_are_stripped(text, code):
    assert without_fence(text) == code


def test_long_texts_keep_both_ends():
    assert cut("abc", 3) == "abc"
    assert cut("abcdefghij", 4) == "ab\n... 6 characters cut ...\nij"
    lines = [str(n) for n in range(100)]
    assert useful_lines("\n".join(lines)).splitlines() == [*lines[:6], "... 84 lines cut ...", *lines[-10:]]
    assert useful_lines("\n".join(lines[:17])) == "\n".join(lines[:17])
