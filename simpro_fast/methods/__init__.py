"""Training methods: one call per step, one per period, two priors."""

from simpro_fast.methods.abc import ABC
from simpro_fast.methods.acr import ACR, ACRNoAnchors
from simpro_fast.methods.adello import ADELLO
from simpro_fast.methods.base import Method, common
from simpro_fast.methods.ccl import CCL
from simpro_fast.methods.cdmad import CDMAD
from simpro_fast.methods.cossl import CoSSL
from simpro_fast.methods.cpe import CPE
from simpro_fast.methods.cpg import CPG
from simpro_fast.methods.crest_plus import CReSTPlus
from simpro_fast.methods.darp import DARP
from simpro_fast.methods.daso import DASO
from simpro_fast.methods.fixmatch import FixMatch
from simpro_fast.methods.needs import Change, Heads, Needs, PhaseTools, Setting
from simpro_fast.methods.output import MethodOutput
from simpro_fast.methods.priors import PriorTracker, log_prior
from simpro_fast.methods.registry import (
    build_method,
    method_class,
    register_method,
    resolve_alpha,
)
from simpro_fast.methods.simpro import SimPro
from simpro_fast.methods.simpro_star import SimProStar

__all__ = [
    "ABC",
    "ACR",
    "ADELLO",
    "CCL",
    "CDMAD",
    "CPE",
    "CPG",
    "DARP",
    "DASO",
    "ACRNoAnchors",
    "CReSTPlus",
    "Change",
    "CoSSL",
    "FixMatch",
    "Heads",
    "Method",
    "MethodOutput",
    "Needs",
    "PhaseTools",
    "PriorTracker",
    "Setting",
    "SimPro",
    "SimProStar",
    "build_method",
    "common",
    "log_prior",
    "method_class",
    "register_method",
    "resolve_alpha",
]
