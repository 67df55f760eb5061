"""What a run learned: a table for the terminal and figures."""

from simpro_fast.report.figures import ViewsFigure, write_report
from simpro_fast.report.terminal import print_summary

__all__ = ["ViewsFigure", "print_summary", "write_report"]
