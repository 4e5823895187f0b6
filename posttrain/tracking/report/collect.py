"""Collects all that the page of some runs shows: one dictionary for JSON, and the tokens' columns of bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from posttrain import __version__
from posttrain.rollout.files import rollouts_folder
from posttrain.tracking.report.details import LOGPROB_SCALE, Tokens, read_shown
from posttrain.tracking.report.episodes import FileNumbers, Numbers, Place, choose, distributions
from posttrain.tracking.report.folder import RunFolder, groups_of
from posttrain.tracking.report.pieces import Pieces, Splitter, find_tokenizer
from posttrain.tracking.report.thumbnails import Thumbnails

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOST_EPISODES = 400
MOST_TOKENS = 1_000_000
"""Trajectories that a page shows whole, over all its runs, and their tokens."""


@dataclass
class Collector:
    """Reads run folders. One that is kept reads each rollout file's numbers, and each tokenizer, once."""

    numbers: Numbers = field(default_factory=Numbers)
    _tokenizers: dict[str, PreTrainedTokenizerBase] = field(default_factory=dict)
    """By fingerprint."""

    def collect(self, folders: Sequence[RunFolder], most: int = MOST_EPISODES) -> tuple[dict[str, Any], bytes]:
        """Return the page's data and the columns of its tokens.

        Args:
            most: trajectories that it shows whole, over all its runs.
        """
        pieces, tokens, thumbnails = Pieces(), Tokens(), Thumbnails()
        runs, episodes = [], []
        groups = groups_of(folders)
        names = [folder.name for folder in folders]
        for number, folder in enumerate(folders):
            rollouts = rollouts_folder(folder.path)
            files, problems = self.numbers.read(rollouts)
            places = choose(files, most=most // len(folders), most_tokens=MOST_TOKENS // len(folders))
            splitters, why = self._splitters(folder, files, places, pieces)
            shown, unread = read_shown(files, places, number, splitters, tokens, thumbnails)
            episodes += shown
            runs.append(
                folder.summary()
                | {
                    "name": folder.name if names.count(folder.name) == 1 else str(folder.path),
                    "group": groups[number],
                    "curves": folder.curves(),
                    "settings": folder.settings(),
                    "distributions": distributions(files, folder.rows),
                    "episodes": sum(len(file.reward) for file in files),
                    "shown": len(shown),
                    "rollouts": str(rollouts),
                    "uncoloured": why,
                    "problems": [*problems, *unread],
                }
            )
        data = {
            "made": datetime.now(UTC).isoformat(timespec="seconds"),
            "version": __version__,
            "logprob_scale": LOGPROB_SCALE,
            "runs": runs,
            "episodes": episodes,
            "pieces": list(pieces.table),
            "tokens": tokens.count,
            "thumbnails": thumbnails.table,
        }
        return data, tokens.planes()

    def _splitters(
        self, folder: RunFolder, files: Sequence[FileNumbers], places: Sequence[Place], pieces: Pieces
    ) -> tuple[dict[str, Splitter], str]:
        """Return the splitters by fingerprint, for the files that are shown, and why there is none for some."""
        found, missing = {}, ""
        for made_with in {files[number].tokenizer for number, _ in places}:
            tokenizer = self._tokenizers.get(made_with)
            if tokenizer is None:
                tokenizer, why = find_tokenizer(folder.tokenizer_folders(), made_with)
                missing = why or missing
            if tokenizer is not None:
                found[made_with] = Splitter(tokenizer, pieces)
                if made_with:  # without a fingerprint it may be another one in the next run
                    self._tokenizers[made_with] = tokenizer
        return found, missing
