"""Weight updates from trainers to engines: buckets, transports, the engine's update guard and verification."""
