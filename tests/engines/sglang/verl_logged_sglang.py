"""verl's SGLang server, which writes down every answer as SGLang gave it, before trustrl reads it.

Imported by every process of a run (`VERL_USE_EXTERNAL_MODULES`). `TRUSTRL_TEST_LOG` names the file.
"""

import json
import os

from verl.workers.rollout import replica

from trustrl.engines.verl.rollout_pieces import load_sglang

KEPT = ("output_token_sampling_mask", "output_token_sampling_logprobs")


def load_logged():
    """The replica's class. Imports SGLang."""
    import ray

    from trustrl.engines.verl import sglang_server

    load_sglang()

    class LoggedServer(sglang_server.RecordingServer):
        async def launch_server(self, *args, **kwargs):
            await super().launch_server(*args, **kwargs)
            self.tokenizer_manager.generate_request = self.logged(self.tokenizer_manager.generate_request)

        def logged(self, generate):
            async def written(request, *args, **more):
                async for output in generate(request, *args, **more):
                    meta = output["meta_info"]
                    row = {
                        "prompt": list(request.input_ids), "tokens": list(output["output_ids"]),
                        "stop": meta["finish_reason"]["type"], "version": self.global_steps,
                        **{name: meta[name] for name in KEPT if name in meta},
                    }  # fmt: skip
                    with open(os.environ["TRUSTRL_TEST_LOG"], "a") as log:
                        log.write(json.dumps(row) + "\n")
                    yield output

            return written

    class LoggedReplica(sglang_server.RecordingReplica):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.server_class = ray.remote(LoggedServer)

    return LoggedReplica


replica.RolloutReplicaRegistry.register("sglang", load_logged)
