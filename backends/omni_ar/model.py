"""Triton backend ``omni_ar``: autoregressive stages (language models, thinkers, talkers) with continuous batching."""

import os

# OpenMP reads this when torch loads it. Threads that spin at a barrier starve whatever else shares the cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

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
