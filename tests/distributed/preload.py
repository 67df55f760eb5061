"""What every rank of a test imports; the fork server does it once. Nothing here starts threads."""

import torch
import torch._dynamo

import simpro_fast.cli
import simpro_fast.data.dali_loader
import simpro_fast.training.ending
import simpro_fast.training.resume
import simpro_fast.training.start
import simpro_fast.training.trainer  # noqa: F401
from simpro_fast.training.deepspeed_engine import import_deepspeed

import_deepspeed(torch.device("cpu"))
