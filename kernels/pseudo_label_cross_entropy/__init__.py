"""Masked cross-entropy against pseudo-labels made from a weak view, with logit adjustment."""
