"""What the processes of tests import; the server of `tests.processes` does it once.

Nothing here starts threads, which would be lost in a fork.
"""

import matplotlib.pyplot  # noqa: F401
import nvidia.dali.pipeline  # noqa: F401
import scipy.optimize  # noqa: F401
import sklearn.datasets  # noqa: F401
import torch
import torch._dynamo

import simpro_fast.cli.prepare
import simpro_fast.cli.train
import simpro_fast.data.pipeline.array_loader
import simpro_fast.distributed.failures
import simpro_fast.training.banner
import simpro_fast.training.resume
import simpro_fast.training.trainer  # noqa: F401
from simpro_fast.training.engine.deepspeed import import_deepspeed

import_deepspeed(torch.device("cpu"))
