"""farro qsnr: signal to quantization noise of a model's weights and activations, by format.

Block sizes, kinds of scales and a Hadamard rotation are compared on the same values, in the manner
of "INT v.s. FP: A Comprehensive Study of Fine-Grained Low-bit Quantization Formats" (Chen et al.,
arXiv 2510.25602), whose theory and figures are shown beside what was measured.
"""
