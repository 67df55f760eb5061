import math
from typing import Any

import numpy as np
import pytest
import torch
from sklearn import metrics
from torch import Tensor, nn

from simpro_fast.answers import evaluation
from simpro_fast.answers.evaluation import (
    Evaluation,
    Tally,
    evaluate,
    kl_divergence,
    many_medium_few,
)
from simpro_fast.utils.errors import UserError
from tests.distributed.gloo_ranks import run_ranks

MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)


class ByBrightness(nn.Module):
    """Undoes the normalisation and says the class that the first pixel's red value names."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.batch_norm = nn.BatchNorm1d(num_classes)
        self.sizes: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        assert not self.training
        assert x.dtype == torch.float32 and x.is_contiguous(memory_format=torch.channels_last)
        self.sizes.append(len(x))
        value = (x[:, 0, 0, 0] * STD[0] + MEAN[0]) * 255
        return -(value[:, None] - torch.arange(self.num_classes)).abs()


def images_of(values: list[int]) -> np.ndarray:
    images = np.full((len(values), 4, 6, 3), 200, dtype=np.uint8)
    images[:, 0, 0, 0] = values
    return images


def run(values: list[int], labels: list[int], **options: Any) -> Evaluation:
    model = options.pop("model", None) or ByBrightness(4)
    return evaluate(
        model,
        images_of(values),
        np.array(labels),
        mean=MEAN,
        std=STD,
        num_classes=4,
        device="cpu",
        **options,
    )


def test_counts_and_percentages():
    found = run([0, 0, 1, 3, 3, 0], [0, 0, 0, 3, 1, 1], batch_size=4)
    assert found.correct.tolist() == [2, 0, 0, 1]
    assert found.count.tolist() == [3, 2, 0, 1]
    assert found.top1 == pytest.approx(50.0)
    assert found.per_class == [pytest.approx(200 / 3), 0.0, None, 100.0]
    assert found.top1_class_mean == pytest.approx((200 / 3 + 0 + 100) / 3)


def test_normalisation_is_per_channel():
    seen = []

    class Record(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(x)
            return torch.zeros(len(x), 2)

    images = torch.randint(256, (3, 5, 5, 3), dtype=torch.uint8)
    evaluate(Record(), images, [0, 1, 0], mean=MEAN, std=STD, num_classes=2, device="cpu")
    expected = (images.double() / 255 - torch.tensor(MEAN)) / torch.tensor(STD)
    torch.testing.assert_close(seen[0].double(), expected.permute(0, 3, 1, 2), rtol=1e-5, atol=1e-5)


def test_mode_is_restored_and_batches_are_full_but_the_last():
    model = ByBrightness(4).train()
    run([0] * 10, [0] * 10, model=model, batch_size=4)
    assert model.training and model.sizes == [4, 4, 2]
    run([0], [0], model=model.eval())
    assert not model.training


def test_the_most_confident_mistakes_are_remembered():
    """Nearer to another class's brightness is more confident; batches do not matter."""
    values, labels = [0, 2, 1, 3, 3, 0], [0, 1, 1, 0, 3, 3]
    for batch_size in (1, 2, 6):
        mistakes = run(values, labels, batch_size=batch_size).mistakes
        probability, places, true, predicted = mistakes.tolist()
        assert sorted(probability, reverse=True) == probability
        assert all(0.3 < value < 1 for value in probability)
        assert sorted(places) == [1, 3, 5]
        for place, label, guess in zip(places, true, predicted, strict=True):
            assert (label, guess) == (labels[int(place)], values[int(place)])
    many = run([1] * 100, [0] * 100, batch_size=7).mistakes
    assert many.shape == (4, evaluation.MISTAKES)
    assert run([0, 1], [0, 1]).mistakes.shape == (4, 0)


def guesses(n: int, classes: int) -> tuple[Tensor, Tensor]:
    """Logits that are right more often than not and rather too sure, and the classes."""
    generator = torch.Generator().manual_seed(3)
    targets = torch.randint(classes - 1, (n,), generator=generator)  # the last one is absent
    logits = 2 * torch.randn(n, classes, generator=generator)
    return logits.scatter_add(1, targets[:, None], torch.full((n, 1), 3.0)), targets


@pytest.mark.parametrize("classes", [3, 12])
def test_sums_are_those_of_scikit_learn(classes: int) -> None:
    logits, targets = guesses(700, classes)
    tally = Tally(classes, "cpu")
    for part in range(0, 700, 256):
        tally.add(logits[part : part + 256], targets[part : part + 256])
    found, names = tally.evaluation(), list(range(classes))
    predicted, probabilities = logits.argmax(dim=1), logits.double().softmax(dim=1)
    assert found.top1 / 100 == pytest.approx(metrics.accuracy_score(targets, predicted))
    assert found.top1_class_mean / 100 == pytest.approx(
        metrics.recall_score(targets, predicted, labels=names[:-1], average="macro")
    )
    expected = metrics.confusion_matrix(targets, predicted, labels=names)
    assert found.confusion is not None and found.confusion.tolist() == expected.tolist()
    k = min(5, classes)
    assert found.top_k == k
    assert found.top_k_accuracy / 100 == pytest.approx(
        1 if k == classes else metrics.top_k_accuracy_score(targets, logits, k=k, labels=names)
    )
    assert -found.log_likelihood == pytest.approx(
        metrics.log_loss(targets, probabilities, labels=names), abs=1e-12
    )
    confidence, hit = probabilities.max(dim=1).values.numpy(), (predicted == targets).numpy()
    error = 0.0
    for low in np.arange(15) / 15:
        inside = (confidence > low) & (confidence <= low + 1 / 15)
        error += abs(hit[inside].sum() - confidence[inside].sum()) / 700
    assert found.ece == pytest.approx(error)
    assert sum(b["count"] or 0 for b in found.reliability) == 700
    assert found.reliability[0]["accuracy"] is None


def test_no_matrix_of_very_many_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "CONFUSION_CLASSES", 3)
    tally = Tally(4, "cpu")
    tally.add(torch.eye(4), torch.tensor([0, 1, 2, 2]))
    found = tally.evaluation()
    assert found.confusion is None and found.correct.tolist() == [1, 1, 1, 0]


def _statistics(rank: int, world_size: int) -> list[Any]:
    """Of all logits and of some for the temperature, and of fewer images than ranks."""
    values, labels = [0, 1, 2, 3, 3, 1, 2] * 3, [0, 1, 2, 3, 2, 1, 0] * 3
    ranks = {"rank": rank, "world_size": world_size}
    results: list[Any] = [run([3], [3], **ranks).count.tolist()]
    for numbers in (1 << 23, 30):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(evaluation, "TEMPERATURE_NUMBERS", numbers)
            found = run(values, labels, batch_size=2, temperature=True, **ranks)
        assert found.confusion is not None and found.mistakes is not None
        wrong = sorted(found.mistakes[1:].T.tolist())
        exact = [found.correct.tolist(), found.count.tolist(), found.confusion.tolist(), wrong]
        close = [found.log_likelihood, found.temperature, *found.bins.flatten().tolist()]
        results.append((exact, close))
    return results


def test_several_ranks_have_the_statistics_of_one() -> None:
    few, *alone = _statistics(0, 1)
    assert few == [0, 0, 0, 1] and alone[0][0][0] == [3, 6, 3, 3]
    for fewer, *found in run_ranks(_statistics):
        assert fewer == few
        for (exact, close), (wanted, near) in zip(found, alone, strict=True):
            assert exact == wanted and close == pytest.approx(near, rel=1e-6)


@pytest.mark.parametrize(
    ("values", "labels", "expected"),
    [
        ([], [], "no image"),
        ([1, 2], [1], "2 images need as many labels"),
        ([1], [4], "0 to 3 .*got 4"),
        ([1], [-1], "got -1"),
    ],
)
def test_unusable_test_sets_are_errors(values, labels, expected):
    with pytest.raises(UserError, match=expected):
        run(values, labels)


def test_many_medium_few():
    per_class = [90.0, 80.0, 70.0, None, 20.0]
    groups = many_medium_few(per_class, [101, 100, 20, 500, 19])
    assert groups == {"many": 90.0, "medium": 75.0, "few": 20.0}
    assert many_medium_few([50.0, 40.0], [30, 25]) == {"many": None, "medium": 45.0, "few": None}


def test_kl_divergence():
    assert kl_divergence([1, 1], [0.5, 0.5]) == 0
    assert kl_divergence([3, 1], [0.5, 0.5]) == pytest.approx(
        0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    )
    # A class without images adds nothing; an estimate of 0 is floored, then all is rescaled.
    estimate = torch.tensor([1.0, 0.0, 0.0])
    expected = sum(0.5 * math.log(0.5 / (p / (1 + 2e-6))) for p in (1.0, 1e-6))
    assert kl_divergence([4, 4, 0], estimate) == pytest.approx(expected, rel=1e-12)
    # An estimate that sums to less than 1 is the same estimate.
    assert kl_divergence([3, 1], [0.2, 0.2]) == kl_divergence([3, 1], [0.5, 0.5])
    assert kl_divergence([3, 1], [0.2e-6, 0.8e-6]) == pytest.approx(
        kl_divergence([3, 1], [0.2, 0.8])
    )
