"""An agent loop whose longer responses say that other weights sampled them, as if a weight sync had come in between."""

from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

from trustrl.engines.verl.agent_loop import RecordsTopK

LONGEST = 4


class Synced(SingleTurnAgentLoop):
    async def run(self, sampling_params, **kwargs):
        output = await super().run(sampling_params, **kwargs)
        if len(output.response_ids) > LONGEST:
            output.extra_fields["min_global_steps"] = 99
        return output


class Stale(RecordsTopK, Synced):
    pass
