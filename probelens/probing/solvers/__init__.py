"""What fits a probe: logistic regression and ridge, on factored data."""
