"""A stage that does what ``text`` says, wrong or right."""

import contextlib
import json
import os

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


def answer(name, value):
    return pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor(name, np.array([value.encode()], np.object_))])


def broken():
    return pb_utils.InferenceResponse(error=pb_utils.TritonError("Internal: the stage is broken"))


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            self.act(request, request.get_response_sender())

    def act(self, request, sender):
        if pb_utils.get_input_tensor_by_name(request, "control") is not None:
            sender.send(answer("status", json.dumps({"pid": os.getpid()})), flags=FINAL)
            return
        wanted = pb_utils.get_input_tensor_by_name(request, "text").as_numpy()[0].decode()
        if wanted == "silent":
            # Kept, so that nothing ends it but its caller's patience.
            self.kept = [*getattr(self, "kept", []), sender]
            return
        chunks = {"empty": 0, "error on the first": 0, "error on the tenth": 9, "dies": 3}.get(wanted, 3)
        for number in range(chunks):
            sender.send(answer("text", f"{number} "))
        if wanted == "dies":
            os._exit(1)
        if wanted.startswith("error"):
            sender.send(broken(), flags=FINAL)
            return
        sender.send(flags=FINAL)
        if wanted == "two finals":
            with contextlib.suppress(Exception):
                sender.send(answer("text", "too late"), flags=FINAL)
