import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from simpro_fast.errors import UserError
from simpro_fast.evaluation import Evaluation, evaluate, kl_divergence, many_medium_few
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


def _two_rank_evaluation(rank: int, world_size: int) -> list[list[int]]:
    found = run([0, 1, 2, 3, 3], [0, 1, 2, 3, 2], batch_size=2, rank=rank, world_size=world_size)
    fewer = run([3], [3], rank=rank, world_size=world_size)
    return [found.correct.tolist(), found.count.tolist(), fewer.count.tolist()]


def test_every_image_counts_once_over_the_ranks():
    for result in run_ranks(_two_rank_evaluation):
        assert result == [[1, 1, 1, 1], [1, 1, 2, 1], [0, 0, 0, 1]]


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
    by_choice = many_medium_few([50.0, 40.0], [30, 5], many_above=20, few_below=10)
    assert by_choice == {"many": 50.0, "medium": None, "few": 40.0}


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
