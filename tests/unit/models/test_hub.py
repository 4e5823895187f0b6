"""`merge-ckpt --push`: the hub's real client, against a server on this machine that speaks the endpoints it needs."""

import base64
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from posttrain import merge_ckpt
from posttrain.core.errors import ConfigError
from posttrain.models.builtin import create_builtin
from posttrain.models.export import save_text_side
from posttrain.models.load import ModelSource
from posttrain.train import checkpoint
from tests.helpers.saved import save_shards

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

TINY = ModelSource("builtin:tiny")


class Hub(ThreadingHTTPServer):
    """Keeps what is committed. ``refuses``: (path's beginning, status) of requests that it does not answer."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.tokens, self.created, self.files = set(), [], {}
        self.refuses = None


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_POST(self):
        hub = self.server
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = b"".join(iter(self._chunk, b""))
        else:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        hub.tokens.add(self.headers.get("Authorization"))
        if hub.refuses and self.path.startswith(hub.refuses[0]):
            return self._answer({"error": "You have no rights here."}, hub.refuses[1])
        if self.path == "/api/repos/create":
            hub.created.append(json.loads(body))
            return self._answer({"url": f"{hub.url}/team/model"})
        if self.path.startswith("/api/models/team/model/preupload/main"):
            files = [{"path": f["path"], "uploadMode": "regular"} for f in json.loads(body)["files"]]
            return self._answer({"files": [f | {"shouldIgnore": False, "oid": None} for f in files]})
        if self.path.startswith("/api/models/team/model/commit/main"):
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    assert line["value"]["encoding"] == "base64"
                    hub.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            oid = "0" * 40
            return self._answer({"success": True, "commitOid": oid, "commitUrl": f"{hub.url}/team/model/commit/{oid}"})
        return self._answer({"error": f"not here: {self.path}"}, 404)

    def do_GET(self):
        self._answer({"error": f"not here: {self.path}"}, 404)

    def _chunk(self):
        data = self.rfile.read(int(self.rfile.readline(), 16))
        self.rfile.readline()
        return data

    def _answer(self, content, status=200):
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if status >= 400:
            self.send_header("X-Error-Message", content["error"])
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def hub():
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run's folder with a checkpoint."""
    folder = tmp_path_factory.mktemp("run")
    made = checkpoint.begin(folder / "checkpoints", 1)
    save_shards(made / "actor", create_builtin("tiny", 3), None, 1)
    save_text_side(TINY, made / "actor" / "huggingface")
    checkpoint.commit(made, 1, {}, keep=1)
    return folder


def push(run, out, *options, url="http://127.0.0.1:9", token="hf_secret"):
    """The command, as (exit code, stderr). No hub listens at port 9."""
    command = [sys.executable, "-m", "posttrain", "merge-ckpt", str(run), "--out", str(out), *options]
    # Without xet, which is a protocol of its own for large files.
    settings = {"HF_ENDPOINT": url, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(out.parent / "hf"), "HF_TOKEN": token}
    kept = {k: v for k, v in os.environ.items() if k not in ("HF_HUB_OFFLINE", "HF_TOKEN_PATH")}
    done = subprocess.run(command, env=kept | settings, capture_output=True, text=True, check=False, timeout=240)
    return done.returncode, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "private"), [([], True), pytest.param(["--public"], False, marks=pytest.mark.slow)]
)
def test_what_arrives_is_what_is_written(hub, run, tmp_path, options, private):
    out = tmp_path / "out"
    code, said = push(run, out, "--push", "team/model", *options, url=hub.url)
    assert code == 0, said
    assert f"pushed: {hub.url}/team/model" in said
    (made,) = hub.created
    assert (made["organization"], made["name"]) == ("team", "model")
    assert made.get("private", made.get("visibility") == "private") is private  # by release of the client
    assert hub.tokens == {"Bearer hf_secret"}
    assert hub.files == {file.name: file.read_bytes() for file in out.iterdir()}
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= hub.files.keys()


@pytest.mark.parametrize(("options", "message", "hint"), [
    ({"push": "model"}, "'model' is not a repository", "NAMESPACE/NAME"),
    ({"push": "a/b/c"}, "'a/b/c' is not a repository", "NAMESPACE/NAME"),
    ({"push": "team/--"}, r"'team/--' is not a repository", "NAMESPACE/NAME"),
    ({"private": False}, "are about --push", "add --push"),
])  # fmt: skip
def test_what_is_known_before_the_merge_is_said_before(run, tmp_path, options, message, hint):
    with pytest.raises(ConfigError, match=message) as error:
        merge_ckpt.run(str(run), str(tmp_path / "out"), **options)
    assert hint in error.value.hint
    assert not (tmp_path / "out").exists()


def test_without_a_token_nothing_is_merged(run, tmp_path):
    code, said = push(run, tmp_path / "out", "--push", "team/model", token="")
    error, advice = said.strip().splitlines()[-2:]
    assert (code, (tmp_path / "out").exists()) == (2, False)
    assert "no token" in error
    assert "HF_TOKEN" in advice


@pytest.mark.slow
def test_a_hub_that_cannot_be_reached_costs_no_merge(run, tmp_path):
    out = tmp_path / "out"
    code, said = push(run, out, "--push", "team/model")
    error, advice = said.strip().splitlines()[-2:]
    assert code == 1
    assert error.startswith("error: the upload to team/model at http://127.0.0.1:9 failed:")
    assert f"`hf upload team/model {out}`" in advice
    assert (out / "model.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.parametrize(("where", "status"), [("/api/repos", 403), ("/api/models/team/model/commit", 401)])
def test_a_hub_that_refuses(hub, run, tmp_path, where, status):
    hub.refuses = (where, status)
    out = tmp_path / "out"
    code, said = push(run, out, "--push", "team/model", url=hub.url)
    error, advice = said.strip().splitlines()[-2:]
    assert (code, hub.files) == (1, {})
    assert f"refused the upload to team/model ({status}): You have no rights here." in error
    assert "may this token write to team/model?" in advice
    assert (out / "model.safetensors").is_file()


@pytest.mark.slow
def test_paths_of_this_machine_stay_here(hub, tmp_path):
    """An adapter's folder has ``base.json``, which names its base by a path."""
    from posttrain.config import LoraConfig
    from posttrain.models import lora
    from posttrain.models.load import build
    from posttrain.models.weights import load_weights, materialize

    model = build(TINY, dtype=torch.float32)
    lora.inject(model, LoraConfig(rank=2), dtype=torch.float32)
    materialize(model, torch.device("cpu"))
    load_weights(model, TINY, 3)
    made = checkpoint.begin(tmp_path / "checkpoints", 1)
    save_shards(made / "actor", model, None, 1)
    lora.save(model, made / "actor" / "adapter", TINY, 3, write=True)
    checkpoint.commit(made, 1, {}, keep=1)
    code, said = push(tmp_path, tmp_path / "out", "--adapter", "--push", "team/model", url=hub.url)
    assert code == 0, said
    assert "adapter_model.safetensors" in hub.files
    assert (tmp_path / "out" / "base.json").is_file()
    assert "base.json" not in hub.files
