"""farro eval: what quantizing a causal language model costs in accuracy, and what it saves.

loading.py gets the model and the text, variants.py makes the models that are compared, metrics.py
holds the figures as pure functions, run.py is the job, report.py and plot.py show the result.
"""
