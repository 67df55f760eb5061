"""Data sets, splits, draws, augmentation graphs and loaders."""
