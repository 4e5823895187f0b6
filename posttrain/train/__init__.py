"""The trainer: one ``TrainWorker`` a process, FSDP2 over all of them."""
