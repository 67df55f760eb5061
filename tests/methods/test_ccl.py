"""CCL: its estimates, rows that the contrast leaves out, and projections that are trained."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import normalize

from simpro_fast.config import Config
from simpro_fast.config.methods import CCLConfig
from simpro_fast.data.loader import build_loader
from simpro_fast.distributed.process_group import start_ranks
from simpro_fast.methods import CCL, Heads
from simpro_fast.methods.ccl import reliable_contrast, smoothed
from simpro_fast.models import MultiHead
from simpro_fast.training.trainer import Trainer
from tests.distributed.rank_runs import dump, on_ranks
from tests.distributed.rank_runs import train as train_on_ranks
from tests.equality import assert_bit_equal, assert_close
from tests.methods import oracle_ccl
from tests.methods.settings import setting
from tests.training.test_every_method import changes_of

COUNTS = (40, 15, 5)
KEYS: dict[str, Any] = {"threshold": 0.6, "energy": 2.0, "estimate_after": 1}


def build(counts: tuple[int, ...] = COUNTS, **keys: Any) -> CCL:
    torch.manual_seed(0)
    return CCL(CCLConfig(**KEYS | keys), setting(counts, alpha=0.5)).double()


def draws(seed: int, classes: int = 3) -> dict[str, Any]:
    """Arguments of a step: 2 views of 6 labeled, 9 weak and 2 views of 9 strong, float64."""
    g = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return (2 * torch.randn(shape, generator=g, dtype=torch.float64)).requires_grad_()

    found: dict[str, Any] = {"targets": torch.randint(classes, (6,), generator=g)}
    found["head"] = MultiHead(4, classes, heads=2, with_features=True).double()
    torch.nn.init.normal_(found["head"].weight, generator=g)
    for view, rows in {"labeled": 12, "weak": 9, "strong": 18}.items():
        found[f"logits_{view}"] = draw(rows, 2, classes)
        found[f"features_{view}"] = draw(rows, 4)
    return found


def directions(seed: int, *numbers: int) -> list[Tensor]:
    """Rows [n, 5] of length 1 for each n, float64."""
    g = torch.Generator().manual_seed(seed)
    return [normalize(torch.randn(n, 5, generator=g, dtype=torch.float64), dim=1) for n in numbers]


@pytest.mark.parametrize(("mu", "tau"), [(1, 2.0), (3, 0.7)])
def test_every_step_is_that_of_the_authors_code(mu: int, tau: float) -> None:
    """Loss, gradients, pseudo-labels, masks and both estimates over three periods; the oracle was
    written from the authors' code by somebody who had not read `CCL`."""
    own = {"tau": tau, "energy": 3.0, "classify_weight": 0.6, "smooth_weight": 1.3}
    decays = {"estimate_decay": 0.75, "all_decay": 0.25, "estimate_after": 0}
    torch.manual_seed(0)
    ccl = CCL(CCLConfig(**KEYS | own | decays), setting(COUNTS, mu=mu)).double()
    state = oracle_ccl.initial_state(torch.tensor(COUNTS))
    settings = oracle_ccl.Settings(
        mu=mu,
        tau=tau,
        threshold=KEYS["threshold"],
        energy_threshold=-3.0,
        lambda1=0.6,
        lambda2=1.3,
        keep_u=0.75,
        keep_all=0.25,
        warm_epochs=0,
        update_every=5,
        epoch_steps=5,
    )
    reliable = 0
    for step in range(15):
        given = draws(step)
        weak = given["logits_labeled"][:6].detach().requires_grad_()
        given["logits_labeled"] = torch.cat([weak, weak])  # there the heads see one labeled view
        views = ("labeled", "weak", "strong")
        inputs = [weak, given["logits_strong"], given["head"].weight]
        inputs += [given[f"features_{view}"] for view in views]
        ccl.phase = ccl.phase_at(step // 5)
        out = ccl(**given)
        projected = ccl.projection(torch.cat([given[f"features_{view}"] for view in views]))
        rows = projected.split([12, 9, 18])
        centres = ccl.centre_projection(given["head"].rows()[3:])
        expected = oracle_ccl.train_step(
            state,
            settings,
            given["targets"],
            {"labeled": weak, "weak": given["logits_weak"], "strong": given["logits_strong"]},
            dict(zip((*views, "centers"), (*rows, centres), strict=True)),
            torch.zeros(9, dtype=torch.bool),
        )
        state = expected.state
        assert_close(out.loss, expected.total, 1e-9)
        assert out.mask.tolist() == expected.mask.tolist()
        assert out.pseudo_labels.tolist() == expected.labels.tolist()
        reliable += int(expected.reliable_mask.sum())
        found = torch.autograd.grad(out.loss, inputs)
        wanted = torch.autograd.grad(expected.total, inputs)
        for mine, theirs in zip(found, wanted, strict=True):
            assert_close(mine, theirs, 1e-9)
        ccl.end_step(step)
        if step % 5 == 4:
            ccl.end_period()
            assert_close(ccl.u, state.pi_u, 1e-9)
            assert_close(ccl.v, state.pi_all, 1e-9)
    assert 0 < reliable < 15 * 9


def test_estimates_move_by_period_towards_what_is_relied_on() -> None:
    ccl = build(estimate_decay=0.75, all_decay=0.25)
    prior = [c / 60 for c in COUNTS]
    u, v, relied, kept = [1 / 3] * 3, prior, 0, 0
    for period in range(5):
        ccl.phase = ccl.phase_at(period)
        reliable, sure = [1.0] * 3, [1.0] * 3
        for step in range(5):
            given = draws(5 * period + step)
            out = ccl(**given)
            ccl.eval()(**draws(100))  # counts nothing
            ccl.train().end_step(5 * period + step)
            shift = [
                -math.log((prior[k] + v[k]) / 2 + 1e-12) + math.log(u[k] ** 2 + 1e-12)
                for k in range(3)
            ]
            for i, (a, b) in enumerate(given["logits_weak"].tolist()):
                z = [(a[k] + shift[k] + b[k]) / 2 for k in range(3)]
                total = sum(map(math.exp, z))
                q = [math.exp(value) / total for value in z]
                assert out.mask[i] == (max(q) >= 0.6) and out.pseudo_labels[i] == q.index(max(q))
                relied += math.log(total) >= 2
                kept += max(q) >= 0.6
                for k in range(3):
                    reliable[k] += q[k] * (math.log(total) >= 2)
                    sure[k] += q[k] * (max(q) >= 0.6)
        ccl.end_period()
        if period > 1:
            u = [0.75 * u[k] + 0.25 * reliable[k] / sum(reliable) for k in range(3)]
            v = [0.25 * v[k] + 0.75 * sure[k] / sum(sure) for k in range(3)]
        assert_close(ccl.normalised_pi_u(), torch.tensor(u, dtype=torch.float64), 1e-12)
        assert_close(ccl.v, torch.tensor(v, dtype=torch.float64), 1e-12)
    assert 20 < relied < 205 and 20 < kept < 205  # of 225


def test_rows_without_a_label_are_as_if_they_were_not_there() -> None:
    """As in the published code, which leaves them out by their index."""
    centres, rows, weak, strong = directions(0, 3, 12, 4, 8)
    labels = torch.rand(12, 3, generator=torch.Generator().manual_seed(1)).double().softmax(1)
    kept = torch.arange(12) % 3 > 0
    hidden = labels * kept[:, None]
    expected = reliable_contrast(centres, rows[kept], labels[kept])
    assert_close(reliable_contrast(centres, rows, hidden), expected, 1e-12)
    expected = smoothed(centres, rows[kept], labels[kept], weak, strong)
    assert_close(smoothed(centres, rows, hidden, weak, strong), expected, 1e-12)
    assert reliable_contrast(centres, rows, 0 * labels) == 0


def test_smoothing_solves_its_linear_equations() -> None:
    """With one strong view like the weak one, S is half the sum of two cross entropies."""
    centres, rows, weak = directions(2, 3, 12, 40)
    labels = torch.eye(3, dtype=torch.float64).repeat(4, 1)
    others, sides = torch.cat([centres, rows]), torch.cat([torch.ones(3, 3).double(), labels])
    shares = normalize((10 * weak @ others.T).exp() @ (sides / sides.sum(0)), p=1, dim=1)
    system = torch.eye(40, dtype=torch.float64) - 0.2 * (weak @ weak.T).softmax(1)
    found = torch.linalg.solve(system, 0.8 * shares)
    assert_close(found.sum(1), torch.ones(40).double(), 1e-12)
    target = found**4 / (found**4).sum(1, keepdim=True)
    expected = -((target + found) * found.log()).sum(1).mean() / 2
    assert_close(smoothed(centres, rows, labels, weak, weak), expected, 1e-12)


def test_test_head_is_b() -> None:
    weight, bias = torch.randn(2, 3, 4), torch.randn(2, 3)
    heads = Heads(weight, bias, torch.ones(1, 4), torch.zeros(1, 4))
    found = build().test_head(heads, torch.nn.Module())
    assert_bit_equal(torch.cat([found[0].T, found[1][None]]), torch.cat([weight[1].T, bias[1:]]))


@pytest.mark.parametrize("case", ["nothing confident", "no labels", "one class guessed", "zeros"])
def test_degenerate_steps_stay_finite(case: str) -> None:
    """Zeros: features and head, as a head begins on a trained backbone."""
    counts = (3, 0, 9) if case == "one class guessed" else COUNTS
    nothing = {"threshold": 1.01, "energy": 1000.0} if case == "nothing confident" else {}
    ccl = build(counts, **nothing)
    ccl.phase = 1
    for number in range(3):
        given = draws(number)
        if case == "no labels":
            given["targets"].fill_(-100)
        elif case == "one class guessed":
            given["logits_weak"] = torch.tensor([[[1e4, 0, 0]] * 2] * 9).double()
        elif case == "zeros":
            for name, value in given.items():
                if name.startswith("features"):
                    given[name] = torch.zeros_like(value).requires_grad_()
            torch.nn.init.zeros_(given["head"].weight)
        ccl.zero_grad()
        out = ccl(**given)
        out.loss.backward()
        ccl.end_period()
        learned = [p.grad for p in (*ccl.parameters(), given["head"].weight)]
        found = [out.loss, ccl.u, ccl.v, *learned, given["features_strong"].grad]
        assert all(t is not None and t.isfinite().all() and t.abs().max() < 1e4 for t in found)
        assert given["logits_weak"].grad is None
        assert out.mask.any() == (case != "nothing confident")


def test_state_goes_on_within_a_period() -> None:
    first, second = build(), build()
    for number in range(13):
        if number == 8:
            second.load_state_dict(first.state_dict())
        losses = []
        for ccl in (first, second)[: 1 + (number >= 8)]:
            ccl.phase = ccl.phase_at(number // 4)
            losses.append(ccl(**draws(number)).loss)
            if number % 4 == 3:
                ccl.end_period()
            assert_bit_equal(losses[-1], losses[0])
            assert_bit_equal(dict(ccl.state_dict()), dict(first.state_dict()))
    assert not torch.equal(first.u, build().u)


def test_the_optimizer_moves_the_projections_and_no_export_has_them(
    tiny: Callable[..., Config],
) -> None:
    config = tiny(changes_of("ccl", **{"distributed.micro_batch": 4}))
    trainer = Trainer(config, start_ranks(config))
    method, average = trainer.algorithm.method, trainer.algorithm.average.module
    before = {name: tensor.detach().clone() for name, tensor in method.named_parameters()}
    trainer.fit()
    averaged = dict(average.named_parameters())
    assert len(before) == 12
    for name, tensor in method.named_parameters():
        assert tensor.isfinite().all()
        if name.endswith(".0.bias"):
            continue  # the batch norm takes it away again: only rounding moves it
        assert not torch.equal(tensor, before[name])
        of_average = averaged["method_parameters." + name.replace(".", "/")]
        assert not torch.equal(of_average, before[name]) and not torch.equal(of_average, tensor)
    exported = load_file(config.run_dir / "model.safetensors")
    assert exported["head.weight"].shape == (10, 128)
    assert not any("projection" in name for name in exported)


def test_ranks_agree_on_weights_and_estimates(tiny: Callable[..., Config]) -> None:
    """Though each compares its own rows only: gradients of the projections are averaged."""
    config = tiny(changes_of("ccl"))
    first, second = on_ranks(2, train_on_ranks, dump(config), 4, build_loader)
    for key in ("model", "average", "method"):
        assert_close(first[key], second[key], 0.0)
