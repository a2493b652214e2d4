"""Triton backend ``omni_module``: one-shot networks (speech synthesis, recognition, voice activity, VAE …)."""

import triton_python_backend_utils as pb_utils
from omni_runtime.config import StageConfig
from omni_runtime.module import ModuleServer


class TritonPythonModel:
    def initialize(self, args):
        self.server = ModuleServer(pb_utils, StageConfig.from_triton(args))

    def execute(self, requests):
        return self.server.execute(requests)
