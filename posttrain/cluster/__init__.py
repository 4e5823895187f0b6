"""Ray: where processes run, and how the driver talks to them. The only package that imports ray."""
