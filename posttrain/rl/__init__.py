"""The command `rl`: rollouts, advantages and policy updates, step by step.

``command`` checks a run and starts it, ``loop`` is the algorithm, ``sampling`` and ``replay`` bring its rollouts,
``learner`` and ``batch`` turn them into updates.
"""
