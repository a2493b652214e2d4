"""A pipeline that passes on what the faulty stage says."""

from contextlib import aclosing

from omni_runtime.pipeline import Pipeline


class TritonPythonModel(Pipeline):
    async def run(self, request):
        inputs = {"text": request.text("text")}
        async with aclosing(self.pools["faulty"].stream(request, inputs, outputs=["text"])) as answers:
            async for answer in answers:
                yield {"text": answer["text"]}
