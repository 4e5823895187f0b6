"""Scores of responses: statistics, grading, the report, comparisons. `posttrain.evaluation.command` is the command."""
