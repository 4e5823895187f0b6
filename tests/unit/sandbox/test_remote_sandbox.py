"""The client of a SandboxFusion-compatible service, against a real HTTP server that runs programs in our sandbox."""

import json
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from posttrain.config import SandboxConfig
from posttrain.core.errors import ConfigError
from posttrain.rewards import compute_score
from posttrain.sandbox import SandboxError, check_sandbox, check_solution, configure, configured, open_sandbox
from tests.unit.sandbox.test_sandbox import REASON

pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))


class Service:
    """``/run_code``, and a list of HTTP statuses or bodies with which it answers first."""

    def __init__(self):
        self.trouble = []
        self.requests = []
        self.authorizations = set()
        self.sandbox = open_sandbox(SandboxConfig())
        self.lock = threading.Lock()
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with service.lock:
                    service.requests.append((self.path, request))
                    service.authorizations.add(self.headers["Authorization"])
                    status, body = service.trouble.pop(0) if service.trouble else (200, service.run(request))
                data = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args):
                """Quiet."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def run(self, request):
        result = self.sandbox.run(request["code"], request["stdin"], deadline_s=request["run_timeout"])
        timeout = result.status == "timeout"
        return {
            "status": "Success" if result.status == "ok" else "Failed",
            "message": "",
            "compile_result": None,
            "run_result": {
                "status": "TimeLimitExceeded" if timeout else "Finished",
                "execution_time": result.seconds,
                "return_code": result.exit_code,
                "stdout": result.stdout,
                "stderr": result.stderr,
            },
            "files": {},
        }


@pytest.fixture(scope="module")
def service():
    made = Service()
    yield made
    made.server.shutdown()
    made.sandbox.close()


@pytest.fixture
def remote(service):
    service.trouble.clear()
    service.requests.clear()
    sandbox = open_sandbox(SandboxConfig(mode="remote", url=service.url, deadline_s=3.0, memory_mb=512, output_kb=100))
    yield sandbox
    sandbox.close()


def test_programs_run_there(service, remote):
    result = remote.run("print(input()[::-1])", "hello")
    assert (result.status, result.exit_code, result.stdout) == ("ok", 0, "olleh\n")
    path, request = service.requests[0]
    assert path == "/run_code"
    assert request | {"language": "python", "memory_limit_MB": 512, "run_timeout": 3.0} == request
    assert remote.run("1/0").status == "error"
    assert remote.run("while True: pass", deadline_s=0.5).status == "timeout"
    assert remote.run("print('x' * 500_000)").status == "output"


def test_solutions_are_tested_apart_there_too(remote):
    tests = ["assert f(1) == 2", "assert f('é') == 'é'"]
    honest = check_solution(remote, "def f(x): return x + 1 if x == 1 else x", tests, deadline_s=2.0)
    assert [r.status for r in honest] == ["passed", "passed"]
    for cheat in (
        "class A:\n  def __eq__(s, o): return True\ndef f(x): return A()",
        "import os\nos._exit(0)",
        "import os\nos.kill(os.getppid(), 9)",
    ):
        assert not any(r.passed for r in check_solution(remote, cheat, tests, deadline_s=2.0))


def test_trouble_is_retried(service, remote):
    service.trouble += [(503, b""), (429, b"")]
    assert remote.run("print(1)").stdout == "1\n"
    assert len(service.requests) == 3


@pytest.mark.parametrize(
    ("trouble", "message"),
    [
        ((404, b"nothing here"), "HTTP 404: nothing here"),
        ((200, b"<html>"), "not JSON"),
        ((200, b"[1]"), "not an object"),
        (
            (200, {"status": "SandboxError", "message": "no workers", "run_result": None}),
            "the service failed: no workers",
        ),
        ((200, {"status": "Success"}), "without a result"),
    ],
)
def test_a_service_that_fails_is_not_a_program_that_fails(service, remote, trouble, message):
    service.trouble.append(trouble)
    with pytest.raises(SandboxError, match=message):
        remote.run("print(1)")


@pytest.mark.slow
def test_a_service_that_is_away_says_so_within_seconds():
    started = time.monotonic()
    with pytest.raises(SandboxError, match=r"127.0.0.1:9 did not answer 4 times") as caught:
        check_sandbox(SandboxConfig(mode="remote", url="http://127.0.0.1:9"))
    assert "sandbox.url" in (caught.value.hint or "")
    assert time.monotonic() - started < 10.0


@pytest.fixture
def silent():
    """URL of a service that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def test_a_service_that_hangs_is_waited_for_as_long_as_the_caller_says(silent):
    sandbox = open_sandbox(SandboxConfig(mode="remote", url=silent))
    try:
        with pytest.raises(SandboxError, match=r"did not answer within 0\.2 s: ReadTimeout"):
            sandbox.run("print(1)", answer_s=0.2)
        with pytest.raises(SandboxError, match=r"did not answer within 0\.2 s: ReadTimeout"):
            check_solution(sandbox, "def f(x): return x", ["assert f(1) == 1"], deadline_s=0.1, answer_s=0.2)
    finally:
        sandbox.close()


@pytest.mark.parametrize("tests", [{"inputs": ["1"], "outputs": ["1"]}, {"assert_case": ["assert f(1) == 1"]}])
def test_a_grader_gives_a_service_that_hangs_up_before_its_own_deadline(silent, tests, monkeypatch):
    """Else its process is killed, which counts as a wrong answer in eval."""
    monkeypatch.setattr("posttrain.rewards._deadline_s", 0.5)
    before = configured()
    configure(SandboxConfig(mode="remote", url=silent))
    try:
        score = compute_score("codecontests", "```python\ndef f(x): return x\n```", json.dumps(tests))
    finally:
        configure(before)
    assert "did not answer within 0.45 s: ReadTimeout" in (score.error or "")
    assert not score.unfinished


def test_a_key_of_the_service_comes_from_the_environment(service, monkeypatch):
    service.authorizations.clear()
    monkeypatch.setenv("SANDBOX_KEY", "k-123")
    made = SandboxConfig(mode="remote", url=service.url, api_key_env="SANDBOX_KEY")
    sandbox = open_sandbox(made)
    try:
        assert sandbox.run("print(1)").stdout == "1\n"
    finally:
        sandbox.close()
    assert service.authorizations == {"Bearer k-123"}
    monkeypatch.delenv("SANDBOX_KEY")
    with pytest.raises(ConfigError, match=r"sandbox\.api_key_env: \$SANDBOX_KEY is not set"):
        open_sandbox(made)


def test_a_password_in_the_url_is_refused_and_not_shown():
    with pytest.raises(ConfigError, match=r"sandbox\.url holds a user or password") as refused:
        open_sandbox(SandboxConfig(mode="remote", url="http://me:secret@127.0.0.1:9"))
    assert "secret" not in str(refused.value)
    assert refused.value.hint == "use sandbox.api_key_env"
