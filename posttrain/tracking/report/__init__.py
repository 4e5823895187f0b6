"""The report of runs: what lies in their folders, as one page that needs nothing else (docs/report.md)."""
