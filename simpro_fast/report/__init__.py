"""What a run learned: a table for the terminal and figures."""

from simpro_fast.report.figures import ViewsSheet, write_report
from simpro_fast.report.terminal import print_summary

__all__ = ["ViewsSheet", "print_summary", "write_report"]
