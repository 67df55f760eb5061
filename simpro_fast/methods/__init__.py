"""Training methods: one call per step, one per period, two priors."""

from simpro_fast.methods.build import build_method, resolve_alpha
from simpro_fast.methods.fixmatch import FixMatch
from simpro_fast.methods.output import MethodOutput
from simpro_fast.methods.priors import PriorTracker
from simpro_fast.methods.simpro import SimPro

__all__ = ["FixMatch", "MethodOutput", "PriorTracker", "SimPro", "build_method", "resolve_alpha"]
