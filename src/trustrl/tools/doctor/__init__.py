"""Machine checks for `trustrl doctor`: versions, open ports, insecure settings, threads, and disk.

None of the checks imports torch or an engine.

findings               the result of a check: problem, reason, and fix
declared_requirements  version requirements that packages declare
package_versions       installed versions compared with those requirements
ports                  listening sockets of Ray and vLLM that the network can reach
environment            insecure environment variables, secrets, and thread counts
storage                the model cache: writable, size, free space
examination            runs every check and formats the result as text or JSON
"""
