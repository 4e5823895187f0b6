"""What a run tells while it runs: metrics.jsonl, and a live panel or plain lines on stderr."""

from posttrain.track.metrics import truncate_metrics
from posttrain.track.tracker import Tracker

__all__ = ["Tracker", "truncate_metrics"]
