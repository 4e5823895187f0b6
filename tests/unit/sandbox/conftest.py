"""What the sandbox's tests share."""

from collections.abc import Iterator

import pytest

from posttrain.config import SandboxConfig
from posttrain.sandbox import Sandbox, open_sandbox


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    opened = open_sandbox(SandboxConfig(deadline_s=5.0))
    yield opened
    opened.close()
