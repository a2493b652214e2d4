"""Autoregressive stages: an engine takes prompts and yields deltas, many at once.

``engine``       what every engine offers, and the choice of one (``torch`` here; vLLM's AsyncLLM has room beside it)
``messages``     prompt in, delta out; ``sampling``: the settings of one request
``torch_engine`` the embedded engine: a thread of steps over ``scheduler``, ``network``, ``sampler``, ``detokenizer``
``chat``         chat messages to a prompt
"""
