"""What only a device can show: graphs, synchronisation, compilations, addresses past 2**31."""

import pytest
import torch
from simpro_kernels import adjusted_cross_entropy, pseudo_label_cross_entropy
from simpro_kernels.pseudo_label_cross_entropy import triton_tiles
from torch import Tensor

pytestmark = pytest.mark.gpu


def _losses(weak: Tensor, strong: Tensor, targets: Tensor, prior: Tensor) -> Tensor:
    pseudo = pseudo_label_cross_entropy(weak, strong, prior, prior, 0.5, impl="triton")
    labeled = adjusted_cross_entropy(weak, targets, prior)
    return pseudo.loss + labeled + 0 * pseudo.class_mass.sum()


def _inputs(num_images: int, num_classes: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    weak = 5 * torch.randn(num_images, num_classes, device="cuda")
    strong = torch.randn(2 * num_images, num_classes, device="cuda", requires_grad=True)
    targets = torch.arange(num_images, device="cuda") % num_classes
    prior = torch.randn(num_classes, device="cuda").log_softmax(0)
    return weak, strong, targets, prior


@pytest.mark.parametrize("num_classes", [10, 1000, 21841])
def test_no_synchronisation(num_classes: int) -> None:
    weak, strong, targets, prior = _inputs(64, num_classes)
    _losses(weak, strong, targets, prior).backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        (_losses(weak, strong, targets, prior) * 3).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("num_classes", [10, 1000])
def test_a_cuda_graph_replays_with_new_logits(num_classes: int) -> None:
    weak, strong, targets, prior = _inputs(64, num_classes)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        _losses(weak, strong, targets, prior).backward()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = _losses(weak, strong, targets, prior)
        (captured_grad,) = torch.autograd.grad(captured, strong)
    fresh_weak, fresh_strong, _, _ = _inputs(64, num_classes)
    weak.copy_(fresh_weak)
    with torch.no_grad():
        strong.copy_(fresh_strong)
    graph.replay()
    expected = _losses(weak, strong, targets, prior)
    (expected_grad,) = torch.autograd.grad(expected, strong)
    assert torch.equal(captured, expected) and torch.equal(captured_grad, expected_grad)


def test_another_batch_compiles_nothing() -> None:
    def compiled() -> int:
        caches = triton_tiles.tile_kernel.device_caches
        return sum(len(per_device[0]) for per_device in caches.values())

    def run(num_images: int, num_views: int, threshold: float, skip: int) -> None:
        rows = num_images * (1 + num_views) + skip
        logits = torch.randn(rows, 10, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        weak, strong = logits[skip:].split((num_images, num_views * num_images))
        pseudo_label_cross_entropy(weak, strong, None, None, threshold, impl="triton")

    run(64, 2, 0.9, 0)
    before = compiled()
    assert before > 0
    for arguments in ((1, 1, 0.0, 1), (513, 3, 1.0, 7), (1000, 2, 0.95, 16)):
        run(*arguments)
    assert compiled() == before


def test_addresses_past_two_to_the_31() -> None:
    """2**31 elements of bfloat16 logits: 4 GiB, and as much for the gradient."""
    num_classes, num_images = 1000, 2_150_000
    if torch.cuda.get_device_properties(0).total_memory < 24 * 2**30:
        pytest.skip("needs 24 GiB of device memory")
    strong = torch.zeros(num_images, num_classes, device="cuda", dtype=torch.bfloat16)
    strong[-1, 7] = 3.0
    strong.requires_grad_()
    weak = torch.zeros(1, num_classes, device="cuda", dtype=torch.bfloat16)
    weak[0, 7] = 20.0
    rows = pseudo_label_cross_entropy(
        weak.expand(num_images, -1), strong, None, None, 0.5, reduction="none", impl="triton"
    ).loss
    rows[-1].backward()
    expected = torch.nn.functional.cross_entropy(
        strong[-1:].detach().double(), torch.tensor([7], device="cuda")
    )
    torch.testing.assert_close(rows[-1].double(), expected, rtol=1e-4, atol=1e-4)
    assert strong.grad is not None
    assert strong.grad[-1].float().abs().sum() > 0.1 and (strong.grad[0] == 0).all()


@pytest.mark.parametrize("leaf", [True, False], ids=["leaf", "non-leaf"])
def test_gradient_of_one_is_handed_over_without_a_copy(leaf: bool) -> None:
    """Peak memory of a step: the logits and one gradient, no second buffer."""
    weak, strong, _, _ = _inputs(4096, 1000)

    def step() -> None:
        logits = strong if leaf else strong.view(2, -1).view(len(strong), -1)
        pseudo_label_cross_entropy(weak, logits, None, None, 0.5, impl="triton").loss.backward()

    step()
    strong.grad = None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    gradient = strong.numel() * strong.element_size()
    assert torch.cuda.max_memory_allocated() - before < 1.5 * gradient
