"""A folder of a model on the Hugging Face hub."""

from __future__ import annotations

import shlex
from pathlib import Path

from posttrain.core.errors import ConfigError, RunError, first_line

NOT_SENT = ["base.json"]
"""Paths on this machine, see ``models.lora``."""


def is_repository(name: str) -> bool:
    """Return whether a repository of the hub may have this name."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def check_target(repo: str) -> None:
    """Check that something could be uploaded to ``repo``, as far as can be told without the network.

    Raises:
        ConfigError: it is not NAMESPACE/NAME, or there is no token, or no network is wanted.
    """
    from huggingface_hub import constants, get_token

    if repo.count("/") != 1 or not is_repository(repo):
        raise ConfigError(f"--push: {repo!r} is not a repository", hint="write NAMESPACE/NAME, as my-team/my-model")
    if constants.HF_HUB_OFFLINE:
        raise ConfigError("--push: HF_HUB_OFFLINE forbids it", hint="unset HF_HUB_OFFLINE")
    if not get_token():
        raise ConfigError(
            "--push: no token of the Hugging Face hub",
            hint="run `hf auth login`, or set HF_TOKEN; it must allow to write",
        )


def upload(folder: Path, repo: str, *, private: bool) -> str:
    """Upload all of ``folder`` into the model repository ``repo``, which is made if it is not there.

    Args:
        private: whether only its owners see a new repository. One that is there stays as it is.

    Returns:
        Where it is.

    Raises:
        RunError: the hub cannot be reached, or refuses.
    """
    import httpx
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError

    api = HfApi()
    again = f"{folder} is written: upload it with `hf upload {repo} {shlex.quote(str(folder))}`"
    try:
        url = str(api.create_repo(repo, private=private, exist_ok=True))
        api.upload_folder(repo_id=repo, folder_path=folder, ignore_patterns=NOT_SENT)
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403):
            again = f"may this token write to {repo}? {again}"
        said = (error.server_message or str(error)).strip().splitlines()[0]
        raise RunError(f"the hub refused the upload to {repo} ({status}): {said}", hint=again) from error
    except (httpx.HTTPError, OSError, RuntimeError) as error:
        raise RunError(
            f"the upload to {repo} at {constants.ENDPOINT} failed: {first_line(error)}", hint=again
        ) from error
    return url
