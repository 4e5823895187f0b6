"""Weight updates from trainers to engines: buckets, senders and transfers, the engine's update guard, and the
weight-sync check."""
