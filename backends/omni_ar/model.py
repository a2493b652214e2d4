"""Triton backend ``omni_ar``: autoregressive stages (language models, thinkers, talkers) with continuous batching."""

import os

# OpenMP reads this when torch loads it. Its default spins for milliseconds at every barrier and starves whatever shares
# the cores; not spinning at all costs a third of the speed, for a step has hundreds of barriers.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")

import triton_python_backend_utils as pb_utils
from omni_runtime.ar.server import ArServer
from omni_runtime.config import StageConfig


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.set_model_transaction_policy({"decoupled": True})
        return config

    def initialize(self, args):
        self.server = ArServer(pb_utils, StageConfig.from_triton(args))

    def execute(self, requests):
        self.server.execute(requests)

    def finalize(self):
        self.server.finalize()
