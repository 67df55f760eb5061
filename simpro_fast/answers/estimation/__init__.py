"""Estimators and statistics on arrays: class shares of unlabeled images, calibration, intervals."""
