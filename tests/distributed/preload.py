"""What every rank of a test imports; the fork server does it once. Nothing here starts threads."""

import simpro_fast.data.dali_loader
import simpro_fast.training.deepspeed_engine
import simpro_fast.training.trainer  # noqa: F401
