"""Triton backend ``omni_module``: one-shot networks (speech synthesis, recognition, voice activity, VAE …)."""

import os

# OpenMP reads this when a network's library loads it. Threads that spin at a barrier starve whatever shares the cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import triton_python_backend_utils as pb_utils
from omni_runtime.config import StageConfig
from omni_runtime.module import ModuleServer


class TritonPythonModel:
    def initialize(self, args):
        self.server = ModuleServer(pb_utils, StageConfig.from_triton(args))

    def execute(self, requests):
        return self.server.execute(requests)
