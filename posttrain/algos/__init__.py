"""The mathematics of RL: advantages, losses, KL and reduction, as pure functions on tensors.

One file per algorithm holds its advantage estimator, its policy loss, what they need, and its bundle of settings, each
declared with a decorator of ``catalog``. The config and the command line read these declarations before torch is
loaded, so a file of an algorithm imports no torch: it works with the methods of the tensors, and of the ``Episodes``,
``TokenInputs`` and ``UpdateTokens`` that it is given.
"""

from posttrain.algos import (
    cispo,
    covariance,
    distill,
    gdpo,
    gmpo,
    gpg,
    grpo,
    gspo,
    opo,
    passk,
    ppo,
    reinforce_plus_plus,
    remax,
    rloo,
    sapo,
)
from posttrain.algos.catalog import (
    ADVANTAGES,
    BUNDLES,
    POLICY_LOSSES,
    AdvantageEstimator,
    PolicyLoss,
    advantage_estimator,
    bundle,
    policy_loss,
)

__all__ = [
    "ADVANTAGES", "BUNDLES", "POLICY_LOSSES", "AdvantageEstimator", "PolicyLoss", "advantage_estimator", "bundle",
    "cispo", "covariance", "distill", "gdpo", "gmpo", "gpg", "grpo", "gspo", "opo", "passk", "policy_loss", "ppo",
    "reinforce_plus_plus", "remax", "rloo", "sapo",
]  # fmt: skip
