"""How the operations behave inside autograd, torch.compile and a training loop."""

import contextlib
import itertools
from collections.abc import Callable

import pytest
import torch
from simpro_kernels import adjusted_cross_entropy, gradient, pseudo_label_cross_entropy
from simpro_kernels.gradient import scale_rows
from simpro_kernels.pseudo_label_cross_entropy import custom_op as pseudo_op
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

IMPLS = pytest.mark.parametrize("impl", ["triton", "eager"])


def _pseudo(strong: Tensor, impl: str, reduction: str = "mean", threshold: float = 0.3) -> Tensor:
    """N = len(strong) / 2 images whose weak logits do not depend on the strong ones."""
    num_images, num_classes = len(strong) // 2, strong.shape[1]
    # Pseudo-random without a generator, which torch.compile cannot trace.
    weak = 3 * (torch.arange(num_images * num_classes, device=strong.device) ** 1.5).sin()
    weak = weak.reshape(num_images, num_classes).to(strong.dtype)
    out = pseudo_label_cross_entropy(
        weak, strong, None, None, threshold, reduction=reduction, impl=impl
    )
    return out.loss


def _adjusted(logits: Tensor, impl: str, reduction: str = "mean") -> Tensor:
    targets = torch.arange(len(logits) // 2, device=logits.device) % logits.shape[1]
    prior = torch.linspace(-2, -1, logits.shape[1], device=logits.device)
    return adjusted_cross_entropy(logits, targets, prior, reduction=reduction, impl=impl)


def _logits(rows: int, classes: int, device: torch.device, dtype: str = "float32") -> Tensor:
    generator = torch.Generator().manual_seed(rows + classes)
    logits = torch.randn(rows, classes, generator=generator)
    return logits.to(device, getattr(torch, dtype)).requires_grad_()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_logits_stay_and_a_second_backward_doubles(dtype: str, device: torch.device) -> None:
    z = _logits(16, 10, device, dtype)
    before = z.detach().clone()
    value = _pseudo(z, "triton")
    value.backward(retain_graph=True)
    assert z.grad is not None
    once = z.grad.clone()
    value.backward()
    assert torch.equal(z, before)
    assert torch.equal(z.grad, 2 * once) and once.abs().sum() > 0


def test_a_graph_that_is_not_retained_is_freed(device: torch.device) -> None:
    z = _logits(8, 5, device)
    value = _pseudo(z, "triton")
    value.backward()
    with pytest.raises(RuntimeError, match="second time"):
        value.backward()


def test_logits_used_twice(device: torch.device) -> None:
    """p = softmax(x) feeds the loss and something else: the gradient in x equals torch's."""
    grads = []
    for impl in ("triton", "eager"):
        x = _logits(12, 6, device)
        p = (3 * x).softmax(1)
        (_pseudo(p, impl) + p.square().mean()).backward()
        grads.append(x.grad)
    torch.testing.assert_close(*grads)


@IMPLS
@pytest.mark.parametrize("num_images", [0, 1, 5, 64])
@pytest.mark.parametrize("threshold", [0.0, 0.3, 1.1], ids=["all", "mixed", "none"])
def test_rows_are_weighted_by_their_incoming_gradient(
    threshold: float, num_images: int, impl: str, device: torch.device
) -> None:
    for num_classes in (1, 3, 100):
        z = _logits(2 * num_images, num_classes, device)
        weights = torch.linspace(-1, 2, 2 * num_images, device=device)
        rows = _pseudo(z, impl, "none", threshold)
        with torch.no_grad():
            assert torch.equal(_pseudo(z, impl, "none", threshold), rows)
        (rows * weights).sum().backward()
        exact = z.detach().double().requires_grad_()
        exact_rows = _pseudo(exact, "eager", "none", threshold)
        (exact_rows * weights).sum().backward()
        torch.testing.assert_close(rows.double(), exact_rows, rtol=1e-5, atol=1e-5)
        assert z.grad is not None and exact.grad is not None
        torch.testing.assert_close(z.grad.double(), exact.grad, rtol=1e-4, atol=1e-6)
        if threshold > 1:
            assert (rows == 0).all() and (z.grad == 0).all()


@IMPLS
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_loss_is_the_same_without_grad(reduction: str, impl: str, device: torch.device) -> None:
    for num_classes in (10, 1000, 2500):
        z = _logits(6, num_classes, device)
        with_grad = _pseudo(z, impl, reduction)
        without = _pseudo(z.detach(), impl, reduction)
        assert torch.equal(with_grad, without)
        assert with_grad.requires_grad and not without.requires_grad


class Log(TorchDispatchMode):
    """Operators, and how many elements the tensors have that they return."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        outputs = out if isinstance(out, (tuple, list)) else (out,)
        for tensor in outputs:
            if isinstance(tensor, Tensor):
                self.sizes.append((func.name(), tensor.numel()))
        return out


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])
@pytest.mark.parametrize("leaf", [True, False], ids=["leaf", "non-leaf"])
def test_the_gradient_of_forward_is_the_one_of_backward(
    leaf: bool, traced: bool, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """No copy, no zeros for outputs without a gradient: backward makes no tensor of that size."""
    addresses: list[int] = []  # in forward, at the logits and in the leaf
    launch, scale = pseudo_op.launch, gradient._launch

    def recorded(*args, **options):  # type: ignore[no-untyped-def]
        result = launch(*args, **options)
        addresses.append(result[-1].data_ptr())
        return result

    def unlogged(*args):  # type: ignore[no-untyped-def]
        with _disable_current_modes():  # the interpreter itself copies tensors about
            scale(*args)

    monkeypatch.setattr(pseudo_op, "launch", recorded)
    monkeypatch.setattr(gradient, "_launch", unlogged)
    x = _logits(16, 10, device)
    z = x if leaf else x.view(2, 80).view(16, 10)
    forward_log, log = Log(), Log()
    with forward_log if traced else contextlib.nullcontext():
        value = _pseudo(z, "triton")
    assert any("simpro" in name for name, _ in forward_log.sizes) == traced
    if not leaf:
        z.register_hook(lambda g: addresses.append(g.data_ptr()))
    with log:
        value.backward()
    assert x.grad is not None
    addresses.append(x.grad.data_ptr())
    assert len(addresses) == (2 if leaf else 3) and len(set(addresses)) == 1
    views = ("aten::detach", "aten::view", "aten::_unsafe_view")
    assert [entry for entry in log.sizes if entry[1] >= 16 and entry[0] not in views] == []


def test_no_gradient_is_made_when_none_is_wanted(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    wanted: list[bool] = []
    launch = pseudo_op.launch

    def recorded(*args, **options):  # type: ignore[no-untyped-def]
        wanted.append(options["with_grad"])
        return launch(*args, **options)

    monkeypatch.setattr(pseudo_op, "launch", recorded)
    z = _logits(6, 4, device)
    _pseudo(z, "triton")
    _pseudo(z.detach(), "triton")
    with torch.no_grad():
        _pseudo(z, "triton")
    assert wanted == [True, False, False]


def test_double_backward_is_refused(device: torch.device) -> None:
    z = _logits(6, 4, device)
    (grad,) = torch.autograd.grad(_pseudo(z, "triton"), z, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable once: use impl='eager'"):
        grad.sum().backward()


@pytest.mark.parametrize("loss", [_pseudo, _adjusted], ids=["pseudo", "adjusted"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_gradcheck_of_the_eager_losses(reduction: str, loss: Callable[..., Tensor]) -> None:
    z = torch.randn(8, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: loss(x, "eager", reduction), z)
    assert torch.autograd.gradgradcheck(lambda x: loss(x, "eager", reduction), z)


@IMPLS
def test_no_gradient_flows_into_the_weak_logits(impl: str, device: torch.device) -> None:
    z = _logits(9, 4, device)
    weak, strong = z[:3], z[3:]
    out = pseudo_label_cross_entropy(weak, strong, None, None, 0.0, impl=impl)
    out.loss.backward()
    assert z.grad is not None
    assert (z.grad[:3] == 0).all() and (z.grad[3:] != 0).all()
    assert not (out.class_mass.requires_grad or out.max_prob.requires_grad)


def test_float16_mean_gradient_does_not_underflow(device: torch.device) -> None:
    """1 / (V*N) times a small probability is below float16; the loss scale comes first."""
    strong = torch.zeros(2048, 2, dtype=torch.float16, device=device)
    strong[:, 0] = 10.0
    strong.requires_grad_()
    weak = strong.detach()[:1024] + 8
    weak[:, 1] = 0
    out = pseudo_label_cross_entropy(weak, strong, None, None, 0.5, impl="triton")
    (out.loss * 2.0**16).backward()
    expected = 2.0**16 / 2048 * float(torch.tensor([-10.0]).exp())
    assert strong.grad is not None
    torch.testing.assert_close(
        strong.grad[:, 1].float().cpu(), torch.full((2048,), expected), rtol=0.02, atol=0
    )


@pytest.mark.parametrize(
    ("hard", "mean", "with_grad", "prior"),
    [(False, True, True, True), (True, False, True, False), (False, False, False, True)],
)
def test_opcheck_pseudo(
    hard: bool, mean: bool, with_grad: bool, prior: bool, device: torch.device
) -> None:
    columns = 8 if hard else 7  # of rows in memory
    weak = torch.randn(5, columns, device=device)[:, :7]
    strong = torch.randn(10, columns, device=device)[:, :7].requires_grad_(with_grad)
    priors = [torch.randn(7, device=device) if prior else None for _ in range(2)]
    bound = torch.tensor(0.2, device=device)
    arguments = (weak, strong, *priors, bound, hard, mean, with_grad, columns)
    torch.library.opcheck(pseudo_op.pseudo_label_cross_entropy, arguments)


@pytest.mark.parametrize("mean", [True, False])
def test_opcheck_scaling(mean: bool, device: torch.device) -> None:
    logits = torch.randn(6, 4, device=device, requires_grad=True)
    factor = torch.randn(() if mean else (6,), device=device)
    grad = torch.randn(6, 4, device=device)
    # A second derivative is refused, so there is no compiled backward to compare.
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(scale_rows, (grad, factor, logits), test_utils=tests)


@pytest.mark.parametrize("spare", [0, 2])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_compile_without_a_graph_break(reduction: str, spare: int, device: torch.device) -> None:
    def step(z: Tensor) -> Tensor:
        twice = nn.functional.pad(z * 2, (0, spare))[:, :6]
        rows = _pseudo(twice, "triton", reduction) + _adjusted(z, "triton", reduction)
        return (rows * 0.5).sum()

    grads = []
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    for function in (step, compiled):
        z = _logits(8, 6, device)
        value = function(z)
        value.backward()
        grads.append((value.detach(), z.grad))
    for got, want in zip(*grads, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7)


def test_twenty_steps_of_training_equal_eager(device: torch.device) -> None:
    def train(impl: str) -> list[float]:
        torch.manual_seed(0)
        model = nn.Linear(6, 4).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        prior = torch.tensor([0.4, 0.3, 0.2, 0.1], device=device).log()
        data = torch.randn(20, 8, 6, generator=torch.Generator().manual_seed(1)).to(device)
        losses = []
        for x, step in zip(data, itertools.count(), strict=False):
            logits = model(torch.cat([x, x + 0.1, x - 0.1]))
            unlabeled = pseudo_label_cross_entropy(
                logits[:8], logits[8:], 2 * prior, prior, 0.4, hard=step % 2 == 1, impl=impl
            )
            targets = torch.arange(8, device=device) % 4
            labeled = adjusted_cross_entropy(logits[:8], targets, prior, impl=impl)
            optimizer.zero_grad()
            (2 * labeled + unlabeled.loss).backward()
            optimizer.step()
            losses.append(float(labeled + unlabeled.loss))
        return losses

    torch.testing.assert_close(train("triton"), train("eager"), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("impl", ["eager", "triton"])
def test_a_call_under_inference_mode_leaves_nothing_behind(impl: str, device: torch.device) -> None:
    threshold = 0.3125 if impl == "eager" else 0.34375  # of no other test
    with torch.inference_mode():
        _pseudo(_logits(6, 4, device), impl, threshold=threshold)
    strong = _logits(6, 4, device).requires_grad_()
    _pseudo(strong, impl, threshold=threshold).sum().backward()
    assert strong.grad is not None
