"""Is this machine fit for a run? Versions, open ports, insecure settings, threads, disk; nothing heavy is imported.

findings      what a check says: what, why it matters, what to do
requirements  what packages declare of each other
packages      installed versions against the ranges that trustrl's own requirements declare
ports         listening sockets of Ray and vLLM that the network can reach
environment   settings in the environment, and threads
storage       the folder for models
examination   all of them, as text or JSON
"""
