"""What the tuner looks at: the shapes of training, and of each the launch, the twin, the bytes."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from math import gcd
from typing import Any

import torch
from bench_augment import AugmentConfig, plan_of
from bench_pseudo_label_cross_entropy import THRESHOLD, VIEWS, make_inputs
from kernel_report import (
    ADJUSTED,
    AUGMENT,
    BOTH,
    NORM,
    PSEUDO,
    Specialisation,
    dtype_of,
    plans_of,
    problem_of,
)
from simpro_kernels import (
    adjusted_cross_entropy,
    augment_views,
    batch_norm_act,
    pseudo_label_cross_entropy,
)
from simpro_kernels.launch import Plan
from torch import Tensor

OPS = (PSEUDO, ADJUSTED, NORM, AUGMENT)
IMAGES = {10: 512, 100: 4096, 127: 4096, 1000: 65536, 8142: 16384, 21841: 8192}
"""Classes to unlabeled images."""
WRN = {16: 32, 32: 32, 64: 16, 128: 8}
RESNET = {64: 56, 128: 28, 256: 14, 512: 7}
RESNET_ADDED = {256: 56, 512: 28, 1024: 14, 2048: 7}
"""Channels to side of the pictures; the last with the shortcut."""
VIEWS_OF_A_STEP = {"wrn": 1664, "resnet": 256}
SIDES = (32, 64)


@dataclasses.dataclass(frozen=True)
class Case:
    """A kernel at a shape of training."""

    spec: Specialisation
    rows: int
    """Images of a loss, M of the [M, C] of batch norm, views of augmentation."""

    @property
    def key(self) -> str:
        key: str = problem_of(self.spec).key
        return key

    @property
    def plans(self) -> list[Plan]:
        plans: list[Plan] = plans_of(self.spec.op).candidates(problem_of(self.spec))
        return plans

    def candidates(self) -> list[Specialisation]:
        return [dataclasses.replace(self.spec, candidate=i) for i in range(len(self.plans))]


def all_cases() -> Iterator[Case]:
    """The shapes that matter, those of the step first; no two share an entry of the file."""
    seen: set[tuple[str, str]] = set()
    for case in itertools.chain(_norm_cases(), _loss_cases(), _augment_cases()):
        if (case.spec.op, case.key) not in seen:
            seen.add((case.spec.op, case.key))
            yield case


def _norm_cases() -> Iterator[Case]:
    for network, sides, dtypes, flag in (
        ("wrn", WRN, ("bf16", "fp32"), ""),
        ("resnet", RESNET, ("bf16",), ""),
        ("resnet", RESNET_ADDED, ("bf16",), " FLAG"),
    ):
        for dtype, (channels, side) in itertools.product(dtypes, sides.items()):
            for kernel in ("STATISTICS FLAG", "APPLY" + flag, "SUMS" + flag, "GRADIENT" + flag):
                spec = Specialisation(NORM, channels, dtype, kernel, gcd(8, channels))
                yield Case(spec, VIEWS_OF_A_STEP[network] * side**2)


def _loss_cases() -> Iterator[Case]:
    for (classes, images), dtype in itertools.product(IMAGES.items(), ("bf16", "fp32")):
        for op, options in itertools.product((PSEUDO, ADJUSTED), (BOTH, "PRIORS")):
            yield Case(Specialisation(op, classes, dtype, options, gcd(8, classes)), images)


def _augment_cases() -> Iterator[Case]:
    for side, dtype in itertools.product(SIDES, ("bf16", "fp32")):
        yield Case(Specialisation(AUGMENT, side, dtype), VIEWS_OF_A_STEP["wrn"])


@dataclasses.dataclass(frozen=True)
class Work:
    """What is launched for a case, and whether it is right."""

    run: Callable[[], Any]
    check: Callable[[Any], None]
    """Of what `run` returned; raises AssertionError where the numbers are not the twin's."""
    least_bytes: int


def work_for(case: Case, device: torch.device) -> Work:
    make = {PSEUDO: _pseudo, ADJUSTED: _adjusted, NORM: _norm, AUGMENT: _augment}[case.spec.op]
    return make(case, device)


def close(what: str, got: Tensor, want: Tensor, dtype: str, where: Tensor | None = None) -> None:
    """Within the rounding of the dtype, and of sums by the largest value.

    Raises:
        AssertionError: naming the tensor and how far it is off.
    """
    rtol, atol = (2**-7, 1e-3) if dtype == "bf16" else (1e-4, 1e-4)
    apart = (got.float() - want.float()).abs()
    allowed = rtol * want.float().abs() + atol * want.float().abs().max()
    wrong = ~(apart <= allowed)
    if where is not None:
        wrong &= where
    if bool(wrong.any()):
        worst = float(apart[wrong].max())
        raise AssertionError(f"{what} differs in {int(wrong.sum())} places, by up to {worst:.2g}")


def _pseudo(case: Case, device: torch.device) -> Work:
    from simpro_kernels.pseudo_label_cross_entropy.launch import launch as launch_kernel

    spec = case.spec
    inputs = make_inputs(case.rows, spec.num_classes, dtype_of(spec.dtype), device)
    weak, strong = inputs.weak, inputs.strong.detach()
    priors = (inputs.prior_weak, inputs.prior_strong)
    with_grad = "GRAD" in spec.options
    exact = strong.float().requires_grad_(with_grad)
    bound = torch.tensor(THRESHOLD, device=device)
    want = pseudo_label_cross_entropy(weak.float(), exact, *priors, THRESHOLD, impl="eager")
    grad = torch.autograd.grad(want.loss, exact)[0] if with_grad else None
    size = weak.numel() * weak.element_size()
    mask_rate = float(want.mask.float().mean())

    def check(got: Any) -> None:
        loss, mass, mask, max_prob, got_grad = got
        close("loss", loss, want.loss.detach(), "fp32")
        close("class mass", mass, want.class_mass, "fp32")
        close("max_prob", max_prob, want.max_prob, "fp32")
        if not torch.equal(mask, want.mask):
            raise AssertionError("mask differs")
        if grad is not None:
            close("gradient", got_grad, grad, spec.dtype)

    return Work(
        functools.partial(
            launch_kernel,
            weak,
            strong,
            *priors,
            bound,
            hard=False,
            mean=True,
            with_grad=with_grad,
        ),
        check,
        round(size * (1 + mask_rate * VIEWS + VIEWS * with_grad)),
    )


def _adjusted(case: Case, device: torch.device) -> Work:
    from simpro_kernels.adjusted_cross_entropy.launch import launch as launch_kernel

    spec = case.spec
    generator = torch.Generator(device).manual_seed(0)
    shape = case.rows, spec.num_classes
    logits = torch.randn(shape, generator=generator, device=device).to(dtype_of(spec.dtype))
    targets = torch.randint(shape[1], shape[:1], generator=generator, device=device)
    prior = torch.randn(shape[1], generator=generator, device=device).log_softmax(0)
    with_grad = "GRAD" in spec.options
    exact = logits.float().requires_grad_(with_grad)
    want = adjusted_cross_entropy(exact, targets, prior, impl="eager")
    grad = torch.autograd.grad(want, exact)[0] if with_grad else None

    def check(got: Any) -> None:
        close("loss", got[0], want.detach(), "fp32")
        if grad is not None:
            close("gradient", got[2], grad, spec.dtype)

    return Work(
        functools.partial(
            launch_kernel,
            logits,
            targets,
            prior,
            ignore_index=-100,
            mean=True,
            with_grad=with_grad,
        ),
        check,
        logits.numel() * logits.element_size() * (1 + with_grad),
    )


def _norm(case: Case, device: torch.device) -> Work:
    """Forward or backward of the whole operation, in which one kernel's plan is another."""
    from simpro_kernels.batch_norm_act import launch as kernels

    spec, channels = case.spec, case.spec.num_classes
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    def as_picture(matrix: Tensor) -> Tensor:
        return matrix.float().view(1, -1, 1, channels).movedim(-1, 1)

    def as_matrix(picture: Tensor) -> Tensor:
        return picture.detach().movedim(1, -1).reshape(-1, channels)

    kernel = spec.options.split()[0].lower()
    added = "FLAG" in spec.options and kernel != "statistics"
    x = (normal(case.rows, channels) + normal(channels)).to(dtype_of(spec.dtype))
    residual = normal(*x.shape).to(x.dtype) if added else None
    weight, bias = (1 + 0.1 * normal(channels)), 0.1 * normal(channels)
    slope = 0.0 if added else 0.1
    learned = (
        as_picture(x),
        weight,
        bias,
        *([as_picture(residual)] if residual is not None else []),
    )
    exact = [tensor.clone().requires_grad_() for tensor in learned]
    inner = batch_norm_act(
        exact[0], None, None, *exact[1:3], residual=exact[3] if added else None, impl="eager"
    )
    y = torch.nn.functional.leaky_relu(inner, slope)
    variance, mean = torch.var_mean(x.float(), 0, correction=0)
    unit = x.numel() * x.element_size()
    if kernel in ("statistics", "apply"):
        want_y = as_matrix(y)

        def check_forward(got: Any) -> None:
            close("y", got[0], want_y, spec.dtype)
            close("mean", got[1][:channels], mean, "fp32")
            close("variance", got[1][channels:-1], variance, "fp32")

        moving = torch.zeros_like(bias), torch.ones_like(bias)
        forward = functools.partial(
            kernels.forward, x, residual, weight, bias, *moving, 0.0, 1e-5, slope, None
        )
        return Work(forward, check_forward, (3 + added) * unit)

    grad = normal(*x.shape).to(x.dtype)
    names = ("x", "the weight", "the bias", "the shortcut")
    wanted = dict(zip(names, torch.autograd.grad(y, exact, as_picture(grad)), strict=False))
    # At the kink of the activation a rounding decides; its place is not the kernel's to choose.
    away = as_matrix(inner).abs() > 1e-3

    def check_backward(got: Any) -> None:
        grad_x, grad_residual, grad_weight, grad_bias = got
        close("gradient of x", grad_x, as_matrix(wanted["x"]), spec.dtype, away)
        if added:
            want = as_matrix(wanted["the shortcut"])
            close("gradient of the shortcut", grad_residual, want, spec.dtype, away)
        for name, mine in (("the weight", grad_weight), ("the bias", grad_bias)):
            close(f"gradient of {name}", mine, wanted[name], "bf16")

    saved = torch.cat([mean, variance, mean.new_tensor([case.rows])])
    kept = as_matrix(y).to(x.dtype) if added else None
    backward = functools.partial(
        kernels.backward, grad, x, kept, saved, weight, bias, 1e-5, slope, added, None
    )
    return Work(backward, check_backward, (5 + 3 * added) * unit)


def _augment(case: Case, device: torch.device) -> Work:
    from simpro_kernels.augment.launch import launch as launch_kernel

    side = case.spec.num_classes
    config = AugmentConfig(side, side // 8, True, side // 2, (0.49, 0.48, 0.45), (0.25, 0.24, 0.26))
    plan = plan_of(config)[: case.rows]
    if device.type == "cuda":
        plan = plan.pin_memory()  # once; the copy to the device is timed
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (576, side, side, 3), generator=generator, dtype=torch.uint8)
    images = images.to(device)
    options: dict[str, Any] = {"max_shift": config.max_shift, "dtype": dtype_of(case.spec.dtype)}
    options |= {"mean": config.mean, "std": config.std}
    want = augment_views(images, plan, **options, impl="eager")

    def check(got: Any) -> None:
        if not torch.equal(got, want):
            raise AssertionError(f"{int((got != want).sum())} values differ")

    size = images.numel() + want.numel() * want.element_size()
    return Work(functools.partial(launch_kernel, images, plan, **options), check, size)
