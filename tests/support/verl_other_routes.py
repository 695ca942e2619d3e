"""Module that verl loads to get other routes than the sampler's tokens took: a control of router replay."""

from trustrl_verl_cpu import sampler_server

EXPERTS = 4
_as_sampled = sampler_server.token_output


def token_output(*args):
    """Each token goes to the experts after those that the sampler chose."""
    *given, experts = args
    return _as_sampled(*given, (experts + 1) % EXPERTS)


token_output.__module__ = sampler_server.__name__
sampler_server.token_output = token_output
