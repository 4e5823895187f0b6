"""Ray: where processes run, and how the driver talks to them. The only package that imports ray."""

import os

# Variables that Ray reads when it is imported, which only modules of this package do. No usage reports:
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# GNU OpenMP's threads spin for milliseconds at every barrier. On cores that others use too (a colocated sampler,
# another job) a step then takes several times as long; a short spin costs an idle machine little. Workers inherit it.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
# Ray would start an idle worker for each core, beside the processes of the run, which cannot use them.
os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
