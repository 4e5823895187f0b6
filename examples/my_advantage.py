"""An advantage estimator of your own in one file. docs/algorithms.md says how to run it."""

from posttrain.algos import advantage_estimator
from posttrain.algos.episodes import Advantages, Episodes


@advantage_estimator("win_rate", formula="share of its group that it beats - share that beats it", group=True)
def win_rate(episodes: Episodes, *, margin: float = 0.0) -> Advantages:
    """Return how much more often an episode beats another one of its prompt than it loses, from -1 to 1.

    Args:
        episodes: the rewards of B episodes, and which prompt each belongs to.
        margin: a lead up to this is a draw (algo.advantage_kwargs.margin).
    """
    scores, prompts = episodes.scores(), episodes.by_group()
    leads = scores[:, None] - scores  # [B, B]
    wins = leads.sign() * (leads.abs() > margin) * (prompts.member[:, None] == prompts.member)
    return episodes.advantages(wins.sum(1) / (prompts.size[prompts.member] - 1).clamp(min=1))
