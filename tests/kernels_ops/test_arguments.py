"""Errors that name the argument, what it is and what it should be; the choice of `impl`."""

import logging
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from simpro_kernels import (
    AdjustedCrossEntropy,
    PseudoLabelCrossEntropy,
    adjusted_cross_entropy,
    dispatch,
    pseudo_label_cross_entropy,
)

from tests.processes import PATIENCE

Z = torch.zeros


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logits_weak": [1.0]}, "logits_weak must be a tensor .*, got list"),
        ({"logits_weak": Z(3)}, r"logits_weak must have shape \[rows, classes\].*got \[3\]"),
        ({"logits_weak": Z(3, 0)}, r"at least one class, got \[3, 0\]"),
        ({"logits_weak": Z(3, 4).long()}, "logits_weak must be float32.*got int64"),
        ({"logits_strong": Z(6, 5)}, "logits_strong must have the 4 classes.*got 5"),
        ({"logits_strong": Z(7, 4)}, r"V \* 3 rows .*, got 7"),
        ({"logits_strong": Z(0, 4)}, r"V \* 3 rows .*, got 0"),
        ({"logits_weak": Z(0, 4)}, r"V \* 0 rows .*, got 6"),
        ({"logits_strong": Z(6, 4).bfloat16()}, "dtype of logits_weak.*got torch.bfloat16"),
        ({"logits_strong": Z(6, 4, device="meta")}, r"device of logits_weak \(cpu\), got meta"),
        ({"log_prior_weak": Z(3)}, r"log_prior_weak must have shape \[4\], got \[3\]"),
        ({"log_prior_strong": Z(4).half()}, "log_prior_strong must be float32.*got float16"),
        ({"log_prior_strong": Z(4, device="meta")}, "log_prior_strong must be on the device"),
        ({"log_prior_weak": [0.0] * 4}, r"log_prior_weak must be a tensor \[4\] or None, got list"),
        ({"log_prior_weak": Z(4, requires_grad=True)}, r"pass log_prior_weak.detach\(\)"),
        ({"threshold": float("nan")}, "threshold must be .* not NaN, got nan"),
        ({"threshold": Z(1)}, r"number or a floating tensor \[\], got float32 \[1\]"),
        ({"threshold": torch.tensor(1)}, r"number or a floating tensor \[\], got int64 \[\]"),
        ({"threshold": torch.tensor(0.5, device="meta")}, "threshold must be on the device"),
        ({"reduction": "sum"}, "reduction must be 'mean' or 'none', got 'sum'"),
        ({"impl": "cuda"}, "impl must be one of auto, triton, eager, compile, got 'cuda'"),
    ],
)
def test_pseudo_label_arguments(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "logits_weak": Z(3, 4),
        "logits_strong": Z(6, 4),
        "log_prior_weak": None,
        "log_prior_strong": None,
        "threshold": 0.5,
    }
    with pytest.raises(ValueError, match=message) as error:
        pseudo_label_cross_entropy(**{**arguments, **changes})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logits": Z(6)}, r"logits must have shape .*got \[6\]"),
        ({"targets": Z(3, 1).long()}, r"targets must be a tensor of shape \[B\], got \[3, 1\]"),
        ({"targets": 3}, r"targets must be a tensor of shape \[B\], got int"),
        ({"targets": Z(3).int()}, "targets must be int64, got int32"),
        ({"targets": Z(4).long()}, r"L \* 4 rows .*, got 6"),
        ({"targets": Z(3, device="meta").long()}, "targets must be on the device of logits"),
        ({"log_prior": Z(5)}, r"log_prior must have shape \[4\], got \[5\]"),
        ({"ignore_index": 2}, "ignore_index must not name one of the 4 classes, got 2"),
        ({"reduction": "sum"}, "reduction must be"),
        ({"impl": "fast"}, "impl must be one of"),
    ],
)
def test_adjusted_arguments(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"logits": Z(6, 4), "targets": Z(3).long(), "log_prior": None}
    with pytest.raises(ValueError, match=message):
        adjusted_cross_entropy(**{**arguments, **changes})


def test_modules_check_their_options_at_once() -> None:
    with pytest.raises(ValueError, match="threshold"):
        PseudoLabelCrossEntropy(float("nan"))
    with pytest.raises(ValueError, match="impl"):
        PseudoLabelCrossEntropy(0.5, impl="x")
    with pytest.raises(ValueError, match="reduction"):
        AdjustedCrossEntropy(reduction="x")


def test_priors_that_require_grad_are_fine_where_no_gradient_is_recorded() -> None:
    with torch.no_grad():
        prior = Z(4, requires_grad=True)
        pseudo_label_cross_entropy(Z(3, 4), Z(3, 4), prior, prior, 0.5)


def test_float64_is_for_the_eager_twin() -> None:
    double = Z(3, 4).double()
    out = pseudo_label_cross_entropy(double, double, None, None, 0.1)
    assert out.loss.dtype == torch.float64 == out.class_mass.dtype == out.max_prob.dtype
    with pytest.raises(ValueError, match=r"impl='triton' takes float32.*got float64"):
        pseudo_label_cross_entropy(double, double, None, None, 0.1, impl="triton")


def test_auto_is_eager_on_the_cpu_and_says_so_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "_logged", set())
    with caplog.at_level(logging.INFO, logger="simpro_kernels"):
        for _ in range(3):
            assert dispatch.choose("some_operation", "auto", Z(3, 4)) == "eager"
    ours = [r.getMessage() for r in caplog.records if r.name == "simpro_kernels"]
    assert ours == ["some_operation: impl=eager on cpu"]


def _python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**kept, "CUDA_VISIBLE_DEVICES": "", **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


CALL = """
import torch, simpro_kernels as sk
z = torch.zeros(2, 3)
out = sk.pseudo_label_cross_entropy(z, z, None, None, 0.1)
assert float(out.loss) > 1, out
assert float(sk.adjusted_cross_entropy(z, torch.tensor([0, 1]), None)) > 1
try:
    sk.pseudo_label_cross_entropy(z, z, None, None, 0.1, impl="triton")
except ValueError as error:
    print(error)
"""


def test_without_triton_the_eager_twin_runs_and_triton_is_a_clear_error() -> None:
    result = _python("import sys; sys.modules['triton'] = None\n" + CALL)
    assert result.returncode == 0, result.stderr
    assert "needs the triton package" in result.stdout and "pip install triton" in result.stdout


def test_without_a_gpu_triton_is_a_clear_error() -> None:
    result = _python(CALL)
    assert result.returncode == 0, result.stderr
    assert "needs tensors on a CUDA device, got cpu" in result.stdout
    assert "TRITON_INTERPRET=1" in result.stdout


def test_interpreter_is_used_only_when_asked_for() -> None:
    code = CALL + "from simpro_kernels import dispatch\nprint(dispatch.choose('x', 'auto', z))"
    result = _python(code, TRITON_INTERPRET="1")
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["eager"]
