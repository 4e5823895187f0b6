"""The command `sft`, and what `prefer` shares with it.

``objective`` is what a command brings, ``samples`` reads its data, ``job`` checks a run, and ``loop`` trains.
"""
