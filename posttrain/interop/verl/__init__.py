"""verl's launch scripts, read without running them: the shell (``shell``), Hydra's overrides (``hydra``), what each key
means here (``config.verl``). ``posttrain import-verl`` makes presets of them."""
