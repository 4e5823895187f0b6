"""Scores of responses: statistics, grading, the report, comparisons. `posttrain.evaluate` is the command."""
