"""Log-probabilities of a continuation that several models have sampled in turn, with one KV cache."""

import torch
from transformers import DynamicCache


def by_hand(given, ids, models):
    """Return the log-probabilities of ``ids`` after ``given``.

    Args:
        models: {tokens of ``ids`` that others have sampled: model that samples the next ones}. A model reads in the
            cache what others computed, and computes the last token that it is given itself.
    """
    cache, done, rows = DynamicCache(), 0, []
    whole = [*given, *ids]
    ends = [len(given) + count - 1 for count in [*models][1:]] + [len(whole)]
    with torch.no_grad():
        for model, end in zip(models.values(), ends, strict=True):
            out = model(torch.tensor([whole[done:end]]), past_key_values=cache, use_cache=True)
            cache, done = out.past_key_values, end
            rows.append(out.logits[0].log_softmax(-1))
    found = torch.cat(rows)[:-1].gather(1, torch.tensor(whole)[1:, None]).flatten()
    return found[len(given) - 1 :].tolist()
