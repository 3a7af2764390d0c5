"""One folder per operator: public functions, reference, kernels, tuned tables."""
