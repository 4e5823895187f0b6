"""What a run tells while it runs: metrics to files and boards, and a live panel or plain lines on stderr."""

from posttrain.tracking.tracker import Tracker

__all__ = ["Tracker"]
