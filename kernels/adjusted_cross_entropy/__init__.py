"""Cross-entropy with logit adjustment for labeled views."""
