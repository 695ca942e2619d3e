"""An agent loop of which every fourth response says that other weights sampled it, as after a weight sync in between."""

from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

from trustrl.engines.verl.agent_loop import RecordsTopK


class Synced(SingleTurnAgentLoop):
    async def run(self, sampling_params, **kwargs):
        output = await super().run(sampling_params, **kwargs)
        if sampling_params["temperature"] > 0 and sum(output.response_ids) % 4 == 0:
            output.extra_fields["min_global_steps"] = 99
        return output


class Stale(RecordsTopK, Synced):
    pass
