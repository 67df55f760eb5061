"""CDMAD: the network's logits of an image without content, taken off all others."""

from __future__ import annotations

from typing import ClassVar

import torch
from simpro_kernels import adjusted_cross_entropy, pseudo_label_cross_entropy
from torch import Tensor, nn

from simpro_fast.config.methods import CDMADConfig
from simpro_fast.methods.base import Method, common, prior_dtype
from simpro_fast.methods.needs import Heads, Needs, Setting
from simpro_fast.methods.output import MethodOutput


class CDMAD(Method):
    """CDMAD on FixMatch (Lee and Kim, CVPR 2024).

    With g the logits of an image that is `constant` in every normalised pixel, by the network as it
    trains (batch norm takes the statistics of this image alone), and no gradient through q:

        q    = softmax(f(w) - g), or softmax(f(w)) up to period correct_after * periods
        loss = alpha * mean CE(f(x), y) + mean over all V*N strong rows of [max q >= t] CE(f(s), q)

    q is soft, and t is 0: every image counts. Test: argmax f(x) - g, both by the averaged network
    in evaluation mode, also before the pseudo-labels are corrected.

    Variants: formulas are the same; `paper` has the method's own views, weak labeled ones and two
    strong ones, `released` the common ones. The published numbers come from the former and from
    100 of 500 periods without correction, the default share. The published code calls its image
    white, but its ones come after normalisation, so that it is light grey, as here by default.

    What is not reproduced: in the published code g moves the running statistics of batch norm, here
    it does not; each kind of view passes the network on its own there; its cross entropy has 1e-8
    inside the logarithm; Adam at a constant rate of 0.0015, its decay of the weights and
    RandAugment(3, 4) belong to its own protocol, not to the common one.

    The tracked pi_u counts q over the images that pass the threshold, so all of them.
    State: none of its own.
    """

    Config: ClassVar[type[CDMADConfig]] = CDMADConfig

    @classmethod
    def needs(cls, config: CDMADConfig) -> Needs:
        return Needs(constant_images=(config.constant,))

    def __init__(self, config: CDMADConfig, setting: Setting) -> None:
        super().__init__(**common(config, setting))
        self.constant, self.image_size = config.constant, setting.image_size
        self.uncorrected = config.correct_after * setting.periods

    def phase_at(self, period: int) -> int:
        """0 while pseudo-labels are plain, then 1."""
        return int(period > self.uncorrected)

    def forward(
        self,
        logits_labeled: Tensor,
        targets: Tensor,
        logits_weak: Tensor,
        logits_strong: Tensor,
        logits_constant: Tensor,
    ) -> MethodOutput:
        """See `Method.forward`; `logits_constant` is [1, K]."""
        self.check_shapes(logits_labeled, targets, logits_weak, logits_strong)
        targets, weak = self.checked_targets(targets), logits_weak.detach()
        bias = None
        if self.phase:
            bias = -logits_constant[0].detach().to(prior_dtype(weak))
        labeled = adjusted_cross_entropy(logits_labeled, targets, None, impl=self.impl)
        unlabeled = pseudo_label_cross_entropy(
            weak, logits_strong, bias, None, self.bound, impl=self.impl
        )
        return self.counted(
            labeled,
            unlabeled.loss,
            targets,
            unlabeled.mask,
            (weak if bias is None else weak + bias).argmax(1),
            unlabeled.class_mass,
        )

    @torch.no_grad()
    def test_head(self, heads: Heads, network: nn.Module) -> tuple[Tensor, Tensor]:
        """The head with g taken off its bias."""
        weight, bias = heads.plain(0)
        image = weight.new_full((1, 3, self.image_size, self.image_size), self.constant)
        return weight, bias - network(image)[0]
