"""Sampling of a stream, what EM starts from, and when estimators are said to disagree."""

from __future__ import annotations

import numpy as np
import torch

from simpro_fast.answers.class_shares import Predicted, Reservoir, _disagreement, estimates, sample
from simpro_fast.answers.model import TrainedModel
from simpro_fast.answers.model_file import ModelFile
from simpro_fast.answers.sources import Item
from simpro_fast.config.schema import ModelConfig


def test_a_sample_keeps_the_order_and_prefers_nobody() -> None:
    items = [Item(str(i), "", str(i)) for i in range(4)]
    counts = np.zeros(4)
    for seed in range(2000):
        chosen = [int(item.path) for item in sample(iter(items), 2, seed)[0]]
        assert chosen == sorted(chosen) and len(chosen) == 2
        counts[chosen] += 1
    # Standard deviation 22.4; a draw from one place too many or too few moves the last by 9 or 15.
    assert np.abs(counts - 1000).max() < 5 * 22.4
    assert sample(iter(items), 100, 1) == (items, 0) and sample(iter(items), 1, 1)[1] == 3


def test_chunks_do_not_change_a_reservoir() -> None:
    whole, parts = Reservoir(5, 3), Reservoir(5, 3)
    expected = whole.places(50)
    found = np.concatenate([parts.places(n) for n in (7, 1, 42)])
    assert len(found) == len(expected) and (found[:5] == np.arange(5)).all()
    assert found.max() < 5 and expected.max() < 5 and whole.seen == parts.seen == 50


def test_em_finds_the_shares_from_the_posterior_under_the_distribution_trained_on() -> None:
    """Images of four kinds whose likelihoods are known, so that the shares are, too."""
    shares, phi, tau = np.array([0.2, 0.3, 0.5]), np.array([0.5, 0.3, 0.2]), 2.0
    likelihood = np.array([[0.6, 0.2, 0.1, 0.1], [0.1, 0.6, 0.2, 0.1], [0.1, 0.1, 0.2, 0.6]])
    logits = np.log(likelihood.T * phi) - tau * np.log(phi)  # f of each kind
    images = np.repeat(logits, np.round(100 * shares @ likelihood).astype(int), axis=0)
    file = ModelFile(
        **{"weights_sha256": 64 * "0", "model": ModelConfig(), "method": "simpro", "step": 1},
        **{"fit": "crop", "interpolation": "bilinear"},
        **{"class_names": ("a", "b", "c"), "image_size": 8, "mean": (0.0,) * 3, "std": (1.0,) * 3},
        **{"labeled_prior": (0.8, 0.1, 0.1), "phi": tuple(phi), "pi_u": (0.3, 0.4, 0.3)},
        tau=tau,
    )
    model = TrainedModel(torch.nn.Identity(), file, torch.device("cpu"))
    plain = model.probabilities(images)
    seen = Predicted(np.bincount(plain.argmax(1), minlength=3), plain.sum(0), images)
    found = [row["em"] for row in estimates(model, seen, None, 1)["rows"]]
    np.testing.assert_allclose(found, shares, atol=1e-3)


def test_only_classes_that_matter_and_are_far_outside_are_warned_of() -> None:
    names = ["cats", "dogs", "owls", "rare"]
    estimate = np.array([0.5, 0.3, 0.19, 0.01])
    rows = [
        {"class": name, "estimate": share, "low": share - 0.02, "high": share + 0.02}
        for name, share in zip(names, estimate, strict=True)
    ]

    def said_of(*shift: float) -> list[str]:
        return _disagreement("EM", estimate + np.array(shift), rows)

    assert said_of(0.025, 0, 0, 0.05) == []
    (said,) = said_of(0.1, -0.1, 0, 0)
    assert "cats, dogs" in said and "owls" not in said
    (said,) = said_of(0, 0, 0, 0.3)
    assert "rare" in said
