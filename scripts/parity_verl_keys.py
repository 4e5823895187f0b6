#!/usr/bin/env python
"""How many keys of verl's own launch scripts `posttrain import-verl` finds a place for.

python scripts/parity_verl_keys.py CHECKOUT                      # every script of a checkout of verl
python scripts/parity_verl_keys.py CHECKOUT --only gsm8k dapo    # those with one of these in their path
python scripts/parity_verl_keys.py CHECKOUT --keys               # and each key that found none, the most frequent first

The recipes (DAPO, ReTool) are a repository of their own since January 2026: its checkout belongs into CHECKOUT/recipe.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

from posttrain.config.verl.rules import Outcome
from posttrain.core.errors import ConfigError, DataError
from posttrain.interop.verl.command import check
from posttrain.interop.verl.convert import Converted, convert


def read(script: Path, checkout: Path) -> Converted | None:
    """None for a script that starts no trainer known here. SFT scripts want GPUs and a folder as arguments."""
    try:
        found = convert(script, (), {"HOME": "/HOME"}, checkout)
        return convert(script, ("8", "out"), {"HOME": "/HOME"}, checkout) if found.command == "sft" else found
    except DataError:
        return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--only", nargs="*", default=[""], help="parts of paths")
    parser.add_argument("--without", nargs="*", default=[], help="parts of paths of scripts to leave out")
    parser.add_argument("--keys", action="store_true")
    args = parser.parse_args()
    totals: Counter[Outcome] = Counter()
    missing: Counter[str] = Counter()
    shares = []
    head = ("script", "keys", "mapped", "no need", "not mapped", "accounted for", "resolves")
    print(f"| {' | '.join(head)} |\n|{' --- |' * len(head)}")
    for script in sorted(args.checkout.rglob("*.sh")):
        name = str(script.relative_to(args.checkout))
        if not any(part in name for part in args.only) or any(part in name for part in args.without):
            continue
        found = read(script, args.checkout)
        if found is None:
            continue
        counts, total = found.counted(), len(found.findings)
        try:
            check(found)
            resolves = "yes"
        except ConfigError as error:
            resolves = error.message.removeprefix("the script's values do not go together here: ")
        share = 1 - counts[Outcome.NOT_MAPPED] / total if total else 1.0
        shares.append(share)
        totals.update(counts)
        missing.update(f"{f.key}: {f.detail}" for f in found.findings if f.outcome is Outcome.NOT_MAPPED)
        numbers = " | ".join(str(counts[outcome]) for outcome in Outcome)
        print(f"| {name} | {total} | {numbers} | {100 * share:.0f} % | {resolves} |")
    if not shares:
        print("no script starts a trainer that is known here", file=sys.stderr)
        return 1
    every, none = sum(totals.values()), totals[Outcome.NOT_MAPPED]
    high = sum(share >= 0.9 for share in shares)
    print(
        f"\n{len(shares)} scripts, {every} keys: {totals[Outcome.MAPPED]} mapped, {totals[Outcome.NO_NEED]} "
        f"need not be said, {none} not mapped: {100 * (1 - none / every):.1f} % accounted for; {high} scripts at 90 % "
        f"or more, the lowest {100 * min(shares):.0f} %"
    )
    if args.keys:
        for text, count in missing.most_common():
            print(f"{count}  {text}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
