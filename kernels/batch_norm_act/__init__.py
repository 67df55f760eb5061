"""Batch norm, activation and residual addition in one operation."""
