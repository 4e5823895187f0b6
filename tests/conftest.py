"""Fixtures that all tests share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def test_data() -> Path:
    """Folder of real data: ``POSTTRAIN_TEST_DATA``, default ``../shared/data`` beside the checkout."""
    folder = Path(os.environ.get("POSTTRAIN_TEST_DATA") or REPO.parent / "shared" / "data")
    if not folder.is_dir():
        pytest.skip(f"no real data: {folder} is not a folder (set POSTTRAIN_TEST_DATA)")
    return folder
