"""Batch norm with residual and activation against torch's operators in float64."""

import copy
from typing import Any

import pytest
import torch
from simpro_kernels import BatchNormAct, batch_norm_act
from simpro_kernels import launch as launching
from simpro_kernels.batch_norm_act import plans, reference
from torch import Tensor
from torch.nn import functional

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Above the error of the eager twin, relative to the norm of the result.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
NAMES = ("y", "running_mean", "running_var", "x", "weight", "bias", "residual")


def inputs(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, *, residual: bool
) -> dict[str, Tensor | None]:
    """Channels of very different means and spreads, in channels_last where there are images."""
    g = torch.Generator().manual_seed(0)
    channels = shape[1]
    per_channel = (1, channels, *[1] * (len(shape) - 2))
    spread = 10 ** torch.linspace(-2, 2, channels).view(per_channel)
    x = (torch.randn(shape, generator=g) + 3 * torch.randn(per_channel, generator=g)) * spread
    tensors = {
        "x": x,
        "residual": torch.randn(shape, generator=g) if residual else None,
        "grad": torch.randn(shape, generator=g) + 0.1,
    }
    for name, tensor in tensors.items():
        if tensor is not None:
            tensor = tensor.to(device, dtype)
            if len(shape) == 4:
                tensor = tensor.contiguous(memory_format=torch.channels_last)
            tensors[name] = tensor
    weight, bias = torch.rand(channels, generator=g) + 0.5, torch.randn(channels, generator=g)
    return {**tensors, "weight": weight.to(device), "bias": bias.to(device)}


def run(data: dict[str, Tensor | None], slope: float, impl: str, **options: Any) -> list[Tensor]:
    """Results and gradients, in the order of NAMES."""
    own = {k: None if t is None else t.clone().requires_grad_() for k, t in data.items()}
    x, weight = own["x"], own["weight"]
    assert x is not None and weight is not None
    mean, var = torch.zeros_like(weight, requires_grad=False), torch.ones_like(weight).detach()
    y = batch_norm_act(
        x,
        mean,
        var,
        weight,
        own["bias"],
        residual=own["residual"],
        negative_slope=slope,
        training=True,
        impl=impl,
        **options,
    )
    assert y.dtype == x.dtype and y.shape == x.shape
    y.backward(data["grad"])
    grads = [own[name].grad for name in NAMES[3:] if own[name] is not None]
    return [y.detach(), mean, var, *grads]


def oracle(data: dict[str, Tensor | None], slope: float) -> list[Tensor]:
    """torch's operators in float64."""
    own = {k: None if t is None else t.double().requires_grad_() for k, t in data.items()}
    x, weight, residual = own["x"], own["weight"], own["residual"]
    assert x is not None and weight is not None
    mean, var = torch.zeros_like(weight).detach(), torch.ones_like(weight).detach()
    z = functional.batch_norm(x, mean, var, weight, own["bias"], True)
    z = z if residual is None else z + residual
    y = torch.where(z > 0, z, z * slope)
    y.backward(own["grad"].detach())
    grads = [own[name].grad for name in NAMES[3:] if own[name] is not None]
    return [y.detach(), mean, var, *grads]


def distance(found: Tensor, expected: Tensor) -> float:
    """Relative error in the 2-norm; of matrices and images the largest over the channels."""
    error, size = found.double() - expected, expected
    if expected.dim() > 1:
        error, size = (t.movedim(1, 0).flatten(1) for t in (error, size))
    return float((error.norm(dim=-1) / size.norm(dim=-1).clamp(min=1e-12)).max())


SHAPES = [
    (3, 8, 5, 5),  # fewer rows than a tile
    (5, 40, 7, 9),  # channels that no power of two of 32 divides
    (4, 64, 8, 8),  # whole tiles
    (70, 3, 8, 8),  # several programs
    (5, 300, 3, 3),  # two blocks of channels, masked
    (96, 33),  # no image
]


CASES = [("fp32", shape, residual) for shape in SHAPES for residual in (False, True)]
CASES += [("bf16", shape, i % 2 == 0) for i, shape in enumerate(SHAPES[:4])]
CASES += [("fp16", SHAPES[2], False)]


@pytest.mark.parametrize(("dtype", "shape", "residual"), CASES, ids=str)
def test_kernel_is_as_close_to_float64_as_the_twin(
    dtype: str,
    shape: tuple[int, ...],
    residual: bool,
    device: torch.device,
    nan_in_empty_memory: None,
) -> None:
    slope = (0.1, 0.0, 1.0)[(SHAPES.index(shape) + residual) % 3]
    data = inputs(shape, DTYPES[dtype], device, residual=residual)
    expected = oracle(data, slope)
    kernel, twin = run(data, slope, "triton"), run(data, slope, "eager")
    for name, found, of_twin, wanted in zip(NAMES, kernel, twin, expected, strict=False):
        tolerance = TOLERANCE[torch.float32 if name.startswith("run") else DTYPES[dtype]]
        allowed = distance(of_twin, wanted) + tolerance
        assert distance(found, wanted) <= allowed, name


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format], ids=str)
@pytest.mark.parametrize("slope", [0.1, 1.0])
def test_twin_is_within_a_millionth_of_float64(layout: torch.memory_format, slope: float) -> None:
    """65,536 rows, of which torch's own sums in channels_last are 1e-5 off on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        g = torch.Generator().manual_seed(0)
        x, residual, grad = (torch.randn(64, 16, 32, 32, generator=g) for _ in range(3))
        data = {"x": 1 + 2 * x, "residual": residual, "grad": grad + 0.2 * x + 0.1}
        data = {k: t.contiguous(memory_format=layout) for k, t in data.items()}
        data |= {"weight": torch.rand(16, generator=g) + 0.5, "bias": torch.randn(16, generator=g)}
        for name, found, wanted in zip(
            NAMES, run(data, slope, "eager"), oracle(data, slope), strict=True
        ):
            assert distance(found, wanted) < 1e-6, name
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_two_runs_are_bit_equal_and_programs_change_rounding_only(
    dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = inputs((20, 24, 8, 8), dtype, device, residual=True)
    first, second = (run(data, 0.1, "triton") for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    monkeypatch.setattr(launching, "multiprocessors", lambda _: 1)
    for name, other, same in zip(NAMES, run(data, 0.1, "triton"), first, strict=True):
        assert distance(other, same.double()) < TOLERANCE[dtype], name


@pytest.mark.parametrize("impl", ["triton", "eager"])
def test_ranks_are_further_pieces(impl: str, device: torch.device) -> None:
    """Two ranks of unequal batches, played in turn: forward and backward are those of one."""
    from simpro_kernels.batch_norm_act import launch as kernels

    backend = kernels if impl == "triton" else reference
    data = inputs((40, 24), torch.float32, device, residual=True)
    x, residual, grad = data["x"], data["residual"], data["grad"]
    assert x is not None and residual is not None and grad is not None
    weight, bias = data["weight"], data["bias"]
    parts = [(x[rows], residual[rows], grad[rows]) for rows in (slice(0, 11), slice(11, 40))]

    def forward(part: tuple[Tensor, ...], gather: Any, moving: list[Tensor]) -> Any:
        return backend.forward(*part[:2], weight, bias, *moving, 0.1, 1e-5, 0.1, gather)

    rows: list[Tensor] = []
    for part in parts:
        forward(part, lambda row: rows.append(row) or row[None], [x.new_zeros(24), x.new_ones(24)])
    results, totals = [], []
    for part in parts:
        moving = [x.new_zeros(24), x.new_ones(24)]
        y, saved = forward(part, lambda row: torch.stack(rows), moving)
        results.append((part, y, saved, moving))

    def backward(result: Any, all_reduce: Any) -> Any:
        (own_x, _, own_grad), y, saved, _ = result
        return backend.backward(
            own_grad, own_x, y, saved, weight, bias, 1e-5, 0.1, True, all_reduce
        )

    for result in results:
        backward(result, lambda total: totals.append(total.clone()))
    grads = [backward(result, lambda total: total.copy_(sum(totals))) for result in results]
    expected = oracle(data, 0.1)
    found = [
        torch.cat([y for _, y, _, _ in results]),
        *results[1][3],
        torch.cat([of_rank[0] for of_rank in grads]),
        sum(of_rank[2] for of_rank in grads),
        sum(of_rank[3] for of_rank in grads),
        torch.cat([of_rank[1] for of_rank in grads]),
    ]
    assert torch.equal(results[0][2], results[1][2]), "ranks agree bit for bit"
    for name, ours, wanted in zip(NAMES, found, expected, strict=True):
        assert distance(ours, wanted) < 2e-6, name


def test_traced_code_gets_the_operator(device: torch.device) -> None:
    """The same numbers in one graph, running statistics and gradients included."""
    norm = BatchNormAct(8, negative_slope=0.1, impl="triton", device=device)
    traced = copy.deepcopy(norm)
    g = torch.Generator().manual_seed(0)
    x, residual = (torch.randn(6, 8, 4, 4, generator=g).to(device) for _ in range(2))
    compiled = torch.compile(traced, fullgraph=True, backend="aot_eager")
    for arguments in ((x,), (x, residual)):
        results = []
        for module, call in ((norm, norm), (traced, compiled)):
            own = [t.clone().requires_grad_() for t in arguments]
            y = call(*own)
            y.square().sum().backward()
            results.append([y, *(t.grad for t in own), *(p.grad for p in module.parameters())])
        for eager, graph in zip(*results, strict=True):
            torch.testing.assert_close(graph, eager)
    for ours, theirs in zip(norm.buffers(), traced.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("impl", ["triton", "eager"])
def test_module_is_batch_norm_under_its_own_names(impl: str, device: torch.device) -> None:
    """Training, evaluation, cumulative momentum, no weights: as nn.BatchNorm2d and activation."""
    for options in ({}, {"momentum": None}, {"affine": False, "track_running_stats": False}):
        plain = torch.nn.BatchNorm2d(6, device=device, **options)
        norm = BatchNormAct(6, negative_slope=0.0, impl=impl, device=device, **options)
        norm.load_state_dict(plain.state_dict())
        g = torch.Generator().manual_seed(0)
        for step in range(3):
            if step == 2:
                plain.eval(), norm.eval()
            x, residual = (torch.randn(5, 6, 4, 4, generator=g).to(device) for _ in range(2))
            expected = functional.relu(plain(x) + residual)
            torch.testing.assert_close(norm(x, residual), expected, rtol=1e-5, atol=1e-5)
        assert list(norm.state_dict()) == list(plain.state_dict())
        for ours, theirs in zip(norm.buffers(), plain.buffers(), strict=True):
            torch.testing.assert_close(ours, theirs)


def saved_by(data: dict[str, Tensor | None], slope: float, impl: str) -> int:
    """Storages of x's size and more that forward keeps for backward."""
    kept: dict[int, Tensor] = {}
    x = data["x"]
    assert x is not None

    def pack(tensor: Tensor) -> Tensor:
        if tensor.numel() >= x.numel():
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run(data, slope, impl)
    return len(kept)


def test_only_what_backward_needs_is_kept(device: torch.device) -> None:
    """The kernel recomputes the activation's mask: x alone, and with a residual y as well."""
    alone = inputs((6, 8, 5, 5), torch.float32, device, residual=False)
    both = inputs((6, 8, 5, 5), torch.float32, device, residual=True)
    assert [saved_by(alone, slope, "triton") for slope in (0.1, 1.0)] == [1, 1]
    assert [saved_by(both, slope, "triton") for slope in (0.1, 1.0)] == [2, 1]
    if device.type == "cpu":  # elsewhere the twin is torch's operators, with buffers of their own
        assert [saved_by(alone, slope, "eager") for slope in (0.1, 1.0)] == [2, 1]


def test_a_second_derivative_is_refused(device: torch.device) -> None:
    x = torch.randn(4, 3, 2, 2, device=device, requires_grad=True)
    y = batch_norm_act(x, None, None, training=True, impl="triton")
    (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(3)}, r"takes \[N, C, \.\.\.\], got \[3\]"),
        ({"x": torch.zeros(4, 2, dtype=torch.int64)}, "x must be float32.*got int64"),
        ({"weight": torch.ones(3)}, r"weight must have shape \[2\], got \[3\]"),
        ({"running_mean": None}, "both be tensors or both be None"),
        ({"residual": torch.zeros(4, 1)}, r"residual must be float32 \[4, 2\] like x"),
        ({"negative_slope": -0.1}, "negative_slope must be at least 0, got -0.1"),
        ({"impl": "fast"}, "impl must be one of"),
        ({"x": torch.zeros(1, 2), "impl": "triton"}, r"more than one value per channel.*\[1, 2\]"),
    ],
)
def test_wrong_arguments(change: dict[str, Any], message: str, device: torch.device) -> None:
    arguments = {
        "x": torch.zeros(4, 2),
        "running_mean": torch.zeros(2),
        "running_var": torch.ones(2),
        "training": True,
        **change,
    }
    given = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in arguments.items()}
    with pytest.raises(ValueError, match=message):
        batch_norm_act(**given)


@pytest.mark.gpu
def test_no_synchronisation_and_no_compilation_for_another_batch() -> None:
    norm = BatchNormAct(32, negative_slope=0.1, device="cuda")

    def step(images: int) -> None:
        x = torch.randn(images, 32, 8, 8, device="cuda", requires_grad=True)
        norm(x.contiguous(memory_format=torch.channels_last)).square().sum().backward()

    step(64)
    kept = plans.kept_launcher.cache_info().currsize
    torch.cuda.set_sync_debug_mode("error")
    try:
        for images in (1, 63, 500):
            step(images)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert plans.kept_launcher.cache_info().currsize == kept


def test_more_blocks_of_channels_than_counters_at_hand(device: torch.device) -> None:
    """C = 2,208 has 69 blocks of 32: each has a counter of its own."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 2208, 2, 2, generator=generator).to(device)
    x = x.to(memory_format=torch.channels_last)
    found = []
    for impl in ("triton", "eager"):
        inputs = x.clone(memory_format=torch.preserve_format).requires_grad_()
        numbers = (torch.full((2208,), v, device=device) for v in (0.0, 1.0, 1.0, 0.0))
        mean, var, weight, bias = numbers
        y = batch_norm_act(inputs, mean, var, weight, bias, training=True, impl=impl)
        y.square().mul(torch.arange(2208.0, device=device).view(-1, 1, 1)).mean().backward()
        found.append((y.detach(), mean, var, inputs.grad))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kernel", ["statistics", "sums"])
def test_the_program_that_arrives_last_waits_for_memory_a_few_times(kernel: str) -> None:
    """At every width of WRN-28-2 and ResNet-50, on 132 multiprocessors with 4 programs each."""
    for channels in (16, 32, 64, 128, 256, 512, 1024, 2048):
        problem = plans.Problem(kernel, channels, torch.bfloat16, 8, False)
        partial_results = 4 * 132 // problem.blocks
        assert partial_results * problem.block <= 8 * plans.triton_kernels._MERGED.value, channels
