"""Inference engines behind one contract: token ids in, samples with log-probabilities out, new weights taken."""
