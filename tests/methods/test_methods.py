import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from simpro_fast import FixMatch, SimPro
from simpro_fast.config.methods import FixMatchConfig, SimProConfig
from simpro_fast.methods import build_method, resolve_alpha
from simpro_fast.utils.errors import ConfigError
from tests.distributed.gloo_ranks import run_ranks
from tests.methods.oracles import micro_batches
from tests.methods.settings import setting

COUNTS = [40, 15, 5]
ARGUMENTS = ("logits_labeled", "targets", "logits_weak", "logits_strong")
"""Of `forward`, in the order in which `logits` makes them."""
BUFFERS = ("pi_u", "phi", "labeled_count", "unlabeled_mass")


def logits(
    generator: int, *, b: int = 6, n: int = 9, labeled_views: int = 2, strong_views: int = 2
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Labeled logits, targets, weak and strong logits of a step, float64, K = 3."""
    g = torch.Generator().manual_seed(generator)

    def draw(rows: int) -> Tensor:
        return torch.randn(rows, 3, generator=g, dtype=torch.float64) * 2

    targets = torch.randint(3, (b,), generator=g)
    return draw(labeled_views * b), targets, draw(n), draw(strong_views * n)


def one_hot_logits(labels: Tensor, num_classes: int) -> Tensor:
    """Weak logits whose softmax is one-hot in float64, under any floored prior."""
    return F.one_hot(labels, num_classes).double() * 5e3


# The loss against formulas written out here.


@pytest.mark.parametrize("variant", ["released", "paper"])
@pytest.mark.parametrize("strong_views", [1, 2, 3])
@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize(("adjust_pseudo", "adjust_loss"), [(1, 1), (0, 1), (1, 0), (0, 0)])
def test_simpro_is_algorithm_1(variant, strong_views, hard, adjust_pseudo, adjust_loss):
    tau, threshold, alpha = 1.5, 0.7, 0.3
    simpro = SimPro(
        COUNTS,
        tau,
        threshold,
        0.9,
        alpha,
        strong_views,
        variant=variant,
        hard=hard,
        adjust_pseudo_labels=bool(adjust_pseudo),
        adjust_loss=bool(adjust_loss),
    )
    simpro.pi_u.copy_(torch.tensor([0.1, 0.2, 0.7]))
    labeled, targets, weak, strong = logits(1, strong_views=strong_views)
    out = simpro(labeled, targets, weak, strong)

    phi = torch.tensor(COUNTS, dtype=torch.float64) / 60
    a_phi = tau * phi.log() * adjust_loss
    q = (weak + tau * simpro.pi_u.log() * adjust_pseudo).softmax(1)
    mask = q.max(1).values >= threshold
    assert 0 < mask.sum() < len(mask)
    target = F.one_hot(q.argmax(1), 3).double() if hard else q
    loss_labeled = -torch.stack(
        [
            (labeled[row] + a_phi).log_softmax(0)[targets[row % len(targets)]]
            for row in range(len(labeled))
        ]
    ).mean()
    rows = [
        mask[row % 9] * -(target[row % 9] * (strong[row] + a_phi).log_softmax(0)).sum()
        for row in range(len(strong))
    ]
    loss_unlabeled = torch.stack(rows).mean()
    close = {"rtol": 1e-9, "atol": 1e-9}
    torch.testing.assert_close(out.loss_labeled, loss_labeled, **close)
    torch.testing.assert_close(out.loss_unlabeled, loss_unlabeled, **close)
    torch.testing.assert_close(out.loss, alpha * loss_labeled + loss_unlabeled, **close)
    torch.testing.assert_close(out.class_mass, (target * mask[:, None]).sum(0), **close)
    assert torch.equal(out.mask, mask)
    assert out.mask_rate.item() == pytest.approx(mask.double().mean().item())
    assert torch.equal(out.pseudo_labels, q.argmax(1)) and out.pseudo_labels.dtype == torch.int64


@pytest.mark.parametrize("strong_views", [1, 2])
def test_fixmatch_is_its_formula(strong_views):
    method = FixMatch(COUNTS, threshold=0.8, strong_views=strong_views)
    labeled, targets, weak, strong = logits(2, labeled_views=1, strong_views=strong_views)
    out = method(labeled, targets, weak, strong)
    confidence, hard_label = weak.softmax(1).max(1)
    mask = (confidence >= 0.8).double()
    unlabeled = F.cross_entropy(strong, hard_label.repeat(strong_views), reduction="none")
    expected = F.cross_entropy(labeled, targets) + (unlabeled * mask.repeat(strong_views)).mean()
    torch.testing.assert_close(out.loss, expected, rtol=1e-12, atol=1e-12)
    assert 0 < mask.sum() < len(mask)
    kept = F.one_hot(hard_label[mask.bool()], 3).sum(0)
    assert torch.equal(method.unlabeled_mass, kept.double())
    # FixMatch with V = 2 ignores the priors whatever they are.
    method.pi_u.copy_(torch.tensor([0.98, 0.01, 0.01]))
    assert torch.equal(method(labeled, targets, weak, strong).loss, out.loss)


def test_masked_rows_count_in_the_mean():
    simpro = SimPro([1, 1], tau=1.0, threshold=0.95, strong_views=1, variant="paper")
    weak = torch.tensor([[9.0, 0.0], [0.1, 0.0], [0.0, 0.2], [1.0, 0.5]])
    strong = torch.tensor([[1.0, 3.0], [5.0, 1.0], [2.0, 2.0], [0.0, 4.0]])
    out = simpro(torch.zeros(2, 2), torch.tensor([0, 1]), weak, strong)
    p = 1 / (1 + math.exp(-9))
    row = p * math.log(1 + math.exp(2)) + (1 - p) * math.log(1 + math.exp(-2))
    assert out.mask.tolist() == [True, False, False, False]
    assert out.loss_unlabeled.item() == pytest.approx(row / 4, rel=1e-6)
    assert out.loss_labeled.item() == pytest.approx(math.log(2), rel=1e-6)


@pytest.mark.parametrize("method_class", [SimPro, FixMatch])
def test_gradients_reach_the_labeled_and_strong_logits_only(method_class):
    method = method_class(COUNTS, threshold=0.5, strong_views=2)
    tensors = labeled, _, weak, strong = logits(3)
    for tensor in (labeled, weak, strong):
        tensor.requires_grad_()
    out = method(*tensors)
    out.loss.backward()
    assert weak.grad is None
    assert labeled.grad.abs().sum() > 0
    masked = ~out.mask.repeat(2)
    assert strong.grad[~masked].abs().sum() > 0 and not strong.grad[masked].any()
    others = [out.loss_labeled, out.loss_unlabeled, out.mask_rate, out.class_mass]
    assert not any(tensor.requires_grad for tensor in others)


@pytest.mark.parametrize("variant", ["released", "paper"])
def test_no_confident_image(variant):
    simpro = SimPro(COUNTS, threshold=1.01, variant=variant)
    for step in range(20):
        labeled, targets, weak, strong = logits(step)
        strong.requires_grad_()
        out = simpro(labeled, targets, weak, strong)
        out.loss.backward()
        assert out.loss_unlabeled.item() == 0 and out.mask_rate.item() == 0
        assert not strong.grad.any() and out.loss.isfinite()
        simpro.update_priors()
    for prior in (simpro.normalised_pi_u(), simpro.phi):
        assert (prior > 0).all() and prior.sum().item() == pytest.approx(1, abs=1e-12)
    assert simpro.normalised_pi_u().tolist() == pytest.approx([1 / 3] * 3)
    # The released rule shrinks the buffer in an empty period, the paper's leaves it.
    share = 0.9**20 if variant == "released" else 1.0
    assert simpro.pi_u.sum().item() == pytest.approx(share, rel=1e-12)


@pytest.mark.parametrize("variant", ["released", "paper"])
@pytest.mark.parametrize("tau", [0.0, 1.0, 2.0])
def test_class_without_labeled_image_stays_finite(variant, tau):
    simpro = SimPro([5, 3, 0], tau=tau, threshold=0.4, variant=variant)
    for step in range(20):
        labeled, targets, weak, strong = logits(step)
        labeled.requires_grad_()
        out = simpro(labeled, targets, weak, strong)
        out.loss.backward()
        assert out.loss.isfinite() and labeled.grad.isfinite().all()
        if step % 5 == 4:
            simpro.update_priors()
    assert simpro.phi.isfinite().all()


@pytest.mark.parametrize(("variant", "floor"), [("released", 1.0), ("paper", 2.0)])
def test_floor_of_an_empty_class(variant, floor):
    """log(p^tau + 1e-12) against tau * log(max(p, 1e-12)), read off a two-class loss."""
    simpro = SimPro([1, 0], tau=2.0, strong_views=1, threshold=1.01, variant=variant)
    zeros = torch.zeros(1, 2, dtype=torch.float64)
    out = simpro(zeros, torch.tensor([1]), zeros, zeros)
    assert out.loss_labeled.item() == pytest.approx(-floor * math.log(1e-12), rel=1e-9)


class _NoHostRead(TorchDispatchMode):
    """Fails on operations that make the host wait for a CUDA device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        waiting = ("_local_scalar_dense", "nonzero", "masked_select", "bincount", "unique")
        assert not any(word in func.name() for word in waiting), func.name()
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("method_class", [SimPro, FixMatch])
def test_step_and_update_do_not_wait_for_the_device(method_class):
    method = method_class(COUNTS, threshold=0.6, strong_views=2)
    tensors = logits(13)
    with pytest.raises(AssertionError, match="_local_scalar_dense"), _NoHostRead():
        tensors[0].sum().item()
    tensors[0].requires_grad_()
    with _NoHostRead():
        method(*tensors).loss.backward()
        method.update_priors()


# The priors.


@pytest.mark.parametrize("variant", ["released", "paper"])
def test_priors_after_n_periods_of_true_pseudo_labels(variant):
    """methods.md 16.3: pi_u = .9^n / K + (1 - .9^n) pi_true S / (S + 1)."""
    truth = torch.tensor([0] * 2 + [1] * 6 + [2] * 12)
    targets = torch.tensor([0, 0, 0, 1])
    simpro = SimPro(COUNTS, variant=variant, strong_views=1)
    strong = torch.zeros(20, 3, dtype=torch.float64)
    labeled = torch.zeros(8, 3, dtype=torch.float64)
    periods, steps = 7, 3
    for _ in range(periods):
        for _ in range(steps):
            assert simpro(labeled, targets, one_hot_logits(truth, 3), strong).mask.all()
        simpro.update_priors()
        assert not simpro.labeled_count.any() and not simpro.unlabeled_mass.any()
    pi_true = torch.tensor([0.1, 0.3, 0.6], dtype=torch.float64)
    mass = steps * 20
    shrink = mass / (mass + 1) if variant == "released" else 1.0
    left = 0.9**periods
    torch.testing.assert_close(
        simpro.pi_u, left / 3 + (1 - left) * pi_true * shrink, rtol=1e-12, atol=0
    )
    # phi mixes each labeled image once (though it has two views) with the unlabeled ones.
    mixture = torch.tensor([3 + 2, 1 + 6, 12], dtype=torch.float64) / 24
    phi_0 = torch.tensor(COUNTS, dtype=torch.float64) / 60
    torch.testing.assert_close(simpro.phi, left * phi_0 + (1 - left) * mixture, rtol=1e-12, atol=0)
    assert simpro.normalised_pi_u().sum().item() == pytest.approx(1, abs=1e-15)


def test_soft_mass_of_kept_images_counts():
    simpro = SimPro([1, 1], tau=1.0, threshold=0.8, strong_views=1, momentum=0.0)
    weak = torch.tensor([[math.log(9), 0.0], [0.0, math.log(4)], [0.0, 0.0]]).double()
    simpro(torch.zeros(1, 2).double(), torch.tensor([0]), weak, torch.zeros(3, 2).double())
    assert simpro.unlabeled_mass.tolist() == pytest.approx([0.9 + 0.2, 0.1 + 0.8])
    simpro.update_priors()
    assert simpro.pi_u.tolist() == pytest.approx([1.1 / 3, 0.9 / 3])
    assert simpro.phi.tolist() == pytest.approx([2.1 / 3, 0.9 / 3])


def test_counts_of_micro_batches_equal_those_of_the_batch():
    whole, parts = SimPro(COUNTS, threshold=0.6), SimPro(COUNTS, threshold=0.6)
    step = dict(zip(ARGUMENTS, logits(4, b=8, n=12), strict=True))
    whole(**step)
    for part in micro_batches(step, 4):
        parts(**part)
    assert torch.equal(whole.labeled_count, parts.labeled_count)
    torch.testing.assert_close(whole.unlabeled_mass, parts.unlabeled_mass, rtol=1e-14, atol=0)


def test_evaluation_mode_counts_nothing():
    simpro = SimPro(COUNTS, threshold=0.1).eval()
    assert simpro(*logits(5)).mask.all()
    assert not simpro.labeled_count.any() and not simpro.unlabeled_mass.any()
    before = simpro.pi_u.clone(), simpro.phi.clone()
    simpro.update_priors()
    assert torch.equal(simpro.pi_u, before[0]) and torch.equal(simpro.phi, before[1])


def test_ignored_targets_are_not_counted():
    simpro = SimPro(COUNTS)
    labeled, _, weak, strong = logits(6, b=4)
    simpro(labeled, torch.tensor([2, -100, 0, 2]), weak, strong)
    assert simpro.labeled_count.tolist() == [1, 0, 2]


@pytest.mark.parametrize("cast", [nn.Module.half, nn.Module.bfloat16, nn.Module.float])
def test_casts_leave_the_priors_alone(cast):
    simpro = SimPro([7, 2, 1], threshold=0.5)
    simpro(*logits(7))
    before = {name: getattr(simpro, name).clone() for name in BUFFERS}
    cast(simpro)
    cast(nn.Sequential(simpro))
    simpro.to(torch.float16)
    for name in BUFFERS:
        assert getattr(simpro, name).dtype == torch.float64
        assert torch.equal(getattr(simpro, name), before[name])
    assert list(simpro.state_dict()) == list(BUFFERS)
    assert simpro.to("meta").pi_u.device.type == "meta"


def test_half_precision_logits_count_in_full_precision():
    simpro = SimPro([1, 1], threshold=0.95, strong_views=1)
    # The softmax is 0.9492 before rounding and 0.94922 = bf16(0.95) after.
    gap = math.log(0.9492 / 0.0508)
    weak = torch.tensor([[gap, 0.0]], dtype=torch.bfloat16)
    out = simpro(weak, torch.tensor([0]), weak, weak)
    assert not out.mask.any() and out.loss.dtype == torch.float32


@pytest.mark.parametrize("method_class", [SimPro, FixMatch])
def test_state_dict_round_trip_in_the_middle_of_a_period(method_class):
    first, second = (method_class(COUNTS, threshold=0.6, strong_views=2) for _ in range(2))
    first(*logits(8))
    first.update_priors()
    first(*logits(9))
    assert tuple(first.state_dict()) == BUFFERS
    second.load_state_dict({name: tensor.clone() for name, tensor in first.state_dict().items()})
    for method in (first, second):
        method(*logits(10))
        method.update_priors()
    assert torch.equal(first.pi_u, second.pi_u) and torch.equal(first.phi, second.phi)


def _two_rank_priors(rank: int, world_size: int) -> dict[str, Tensor]:
    simpro = SimPro(COUNTS, threshold=0.6)
    if rank == 1:
        simpro.pi_u.mul_(1.5)  # As if this rank had been restored from another checkpoint.
    for step in range(4):
        given = dict(zip(ARGUMENTS, logits(step, b=4, n=8), strict=True))
        simpro(**list(micro_batches(given, 2))[rank])
        if step % 2:
            simpro.update_priors()
    return simpro.state_dict()


def test_two_ranks_equal_one_on_the_joined_batches():
    ranks = run_ranks(_two_rank_priors)
    single = SimPro(COUNTS, threshold=0.6)
    for step in range(4):
        single(*logits(step, b=4, n=8))
        if step % 2:
            single.update_priors()
    for name in BUFFERS:
        assert torch.equal(ranks[0][name], ranks[1][name]), name
        torch.testing.assert_close(
            ranks[0][name], single.state_dict()[name], rtol=1e-12, atol=1e-12
        )


# Arguments.


@pytest.mark.parametrize(
    ("n", "m", "b", "mu", "batches"),
    [
        (1162, 40_000, 64, 8, (18, 78)),  # CIFAR-10, gamma 150, uniform
        (1236, 40_000, 64, 8, (19, 78)),  # CIFAR-10, gamma 100, uniform
        (1545, 40_000, 64, 8, (24, 78)),  # CIFAR-100, gamma 20, uniform
        (1835, 100_000, 64, 16, (28, 97)),  # STL-10, gamma 10
        (1528, 100_000, 64, 16, (23, 97)),  # STL-10, gamma 20
        (45_589, 184_264, 32, 2, (1424, 2879)),  # ImageNet-1k
        (1162, 9329, 64, 8, (18, 18)),  # CIFAR-10, gamma 150, consistent
        (10, 20, 64, 8, (1, 1)),
        (10, 2000, 64, 8, (1, 3)),
    ],
)
def test_alpha_of_the_published_runs(n, m, b, mu, batches):
    assert resolve_alpha(SimProConfig(), n, m, b, mu) == batches[0] / batches[1]
    paper = resolve_alpha(SimProConfig(variant="paper"), n, m, b, mu)
    assert paper == pytest.approx(mu * n / m, rel=1e-15)


def test_alpha_given_capped_or_of_fixmatch():
    sizes = (1162, 1000, 64, 8)
    assert resolve_alpha(SimProConfig(), *sizes) == 18
    assert resolve_alpha(SimProConfig(alpha_max=1.0), *sizes) == 1
    assert resolve_alpha(SimProConfig(alpha=0.4, alpha_max=1.0), *sizes) == 0.4
    assert resolve_alpha(SimProConfig(alpha=4.0, alpha_max=1.0), *sizes) == 1
    assert resolve_alpha(FixMatchConfig(), *sizes) == 1
    assert resolve_alpha(FixMatchConfig(alpha=3.0), *sizes) == 3
    with pytest.raises(ConfigError, match="0 unlabeled"):
        resolve_alpha(SimProConfig(), 100, 0, 64, 8)


def test_build_method_hands_every_key_on():
    config = SimProConfig(
        variant="paper",
        tau=1.5,
        threshold=0.7,
        momentum=0.8,
        hard=True,
        adjust_pseudo_labels=False,
        adjust_loss=False,
        impl="eager",
    )
    simpro = build_method(config, setting(alpha=0.25, strong_views=3))
    assert isinstance(simpro, SimPro)
    keys = ("variant", "tau", "threshold", "momentum", "hard", "adjust_loss", "impl")
    assert [getattr(simpro, key) for key in keys] == [getattr(config, key) for key in keys]
    assert not simpro.adjust_pseudo_labels and (simpro.alpha, simpro.strong_views) == (0.25, 3)
    fixmatch = build_method(FixMatchConfig(), setting())
    assert isinstance(fixmatch, FixMatch) and fixmatch.hard and fixmatch.strong_views == 2
    assert not build_method(FixMatchConfig(hard=False), setting()).hard
    assert not build_method(SimProConfig(), setting()).hard


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"labeled_counts": [0, 0]}, "not all 0"),
        ({"labeled_counts": [3, -1]}, "none negative"),
        ({"labeled_counts": [[3, 1]]}, "one number of images per class"),
        ({"momentum": 1.0}, "momentum"),
        ({"alpha": 0.0}, "alpha"),
        ({"strong_views": 0}, "strong_views"),
        ({"tau": -1.0}, "tau"),
        ({"variant": "printed"}, "variant"),
    ],
)
def test_impossible_arguments_are_errors(arguments, expected):
    with pytest.raises(ValueError, match=expected):
        SimPro(**{"labeled_counts": COUNTS, **arguments})


def test_shapes_that_do_not_fit_are_errors():
    simpro = SimPro(COUNTS)
    labeled, targets, weak, strong = logits(11)
    with pytest.raises(ValueError, match="2 \\* 9 = 18 rows, got 9"):
        simpro(labeled, targets, weak, strong[:9])
    with pytest.raises(ValueError, match="logits_weak must be"):
        simpro(labeled, targets, weak[:, :2], strong)
    with pytest.raises(ValueError):
        simpro(labeled[:7], targets, weak, strong)


def test_out_of_range_prior_is_seen_as_it_is():
    """Edits of the buffers act at once: nothing derived from them is kept."""
    simpro = SimPro(COUNTS, threshold=0.5)
    step = logits(12)
    before = simpro(*step).pseudo_labels
    simpro.pi_u.copy_(torch.tensor([1e-9, 1e-9, 1.0]))
    after = simpro(*step).pseudo_labels
    assert (after == 2).all() and not torch.equal(before, after)


# Alone, in a plain PyTorch loop.


def _digits() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Labeled head-heavy, unlabeled tail-heavy, balanced test set of handwritten digits."""
    datasets = pytest.importorskip("sklearn.datasets")
    digits = datasets.load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    by_class = [torch.nonzero(labels == k).flatten() for k in range(10)]
    labeled, unlabeled, test = [], [], []
    for k, index in enumerate(by_class):
        test.append(index[-40:])
        count = int(30 * 10 ** (-k / 9))
        labeled.append(index[:count])
        unlabeled.append(index[count : count + int(100 * 10 ** (k / 9 - 1))])
    x, u, t = (torch.cat(part) for part in (labeled, unlabeled, test))
    return images[x], labels[x], images[u], images[t], labels[t]


def _noisy(x: Tensor, strength: float) -> Tensor:
    kept = torch.rand_like(x) > strength
    return x * kept + torch.randn_like(x) * strength


def _accuracy_of_plain_loop(threshold: float) -> float:
    """Test accuracy in percent; a threshold above 1 leaves the labeled loss alone."""
    torch.manual_seed(1)
    images, labels, unlabeled, test_images, test_labels = _digits()
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    simpro = SimPro(labels.bincount(), tau=1.0, threshold=threshold)
    for step in range(240):
        i, j = torch.randint(len(labels), (32,)), torch.randint(len(unlabeled), (128,))
        x, u = images[i], unlabeled[j]
        weak, strong = [_noisy(u, 0.1)], [_noisy(u, 0.3), _noisy(u, 0.3)]
        views = torch.cat([_noisy(x, 0.1), _noisy(x, 0.3), *weak, *strong])
        logits_labeled, logits_weak, logits_strong = model(views).split([64, 128, 256])
        out = simpro(logits_labeled, labels[i], logits_weak, logits_strong)
        optimizer.zero_grad()
        out.loss.backward()
        optimizer.step()
        if step % 20 == 19:
            simpro.update_priors()
    return (model(test_images).argmax(1) == test_labels).double().mean().item() * 100


def test_simpro_in_a_plain_loop_beats_the_labeled_loss_alone():
    assert _accuracy_of_plain_loop(0.6) > _accuracy_of_plain_loop(2.0) + 3 > 60
