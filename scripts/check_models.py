"""Check every cell of docs/models.md on tiny models, and record them in docs/models.json.

    python scripts/check_models.py && python scripts/make_docs.py

It takes a few minutes. tests/unit/models/test_architectures.py holds the record against the same checks.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from transformers.utils import logging

from tests.helpers.architectures import ARCHITECTURES
from tests.helpers.model_checks import FEATURES, RECORDED, Bench, check, record, row, run_two_workers


def main() -> int:
    """Write the record; exit code 1 where a check fails, with the record as it was."""
    logging.disable_progress_bar()
    data = os.environ.get("POSTTRAIN_TEST_DATA")
    templates = Path(data) / "tokenizer" / "templates" if data else None
    table, failed = {}, 0
    with tempfile.TemporaryDirectory() as folder:
        benches = {name: Bench(name, Path(folder, str(i))) for i, name in enumerate(ARCHITECTURES)}
        run_two_workers(list(benches.values()))
        for name, bench in benches.items():
            cells = {}
            for feature in FEATURES:
                try:
                    cells[feature] = check(bench, feature, templates)
                except Exception as error:
                    failed += 1
                    print(f"{name}, {feature}: {type(error).__name__}: {error}", file=sys.stderr)
            table[name] = row(bench, cells)
            print(name, *(cell["result"] for cell in cells.values()), flush=True)
    if failed:
        return 1
    RECORDED.write_text(json.dumps(record(table), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
