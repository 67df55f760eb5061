"""Where every command begins: `simpro-fast VERB ...` and the scripts in `launch/`.

Nothing heavy may be imported here: signals must be handled before the imports of seconds.
"""

from __future__ import annotations

from simpro_fast.fault_tolerance.early_signals import end_on_signals


def train() -> int:
    """Handle signals, then import and run the training command; returns its exit code."""
    end_on_signals()
    from simpro_fast.cli.train import main

    return main()
