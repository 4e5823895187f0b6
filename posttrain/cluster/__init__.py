"""Ray: where processes run, and how the driver talks to them. The only room that imports ray."""
