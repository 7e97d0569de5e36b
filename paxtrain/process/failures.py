"""Phrases of error messages that are about other processes than the one that prints them.

The modules that raise such errors write these phrases. The supervisor looks for them in a worker's last line, so that
it does not blame that worker. This module imports nothing, because a supervisor runs without jax.
"""

# Another process has found bad input, and all processes end.
BAD_INPUT_ELSEWHERE = "its own output says what"
# Not all processes have joined in time.
NOT_ALL_CAME = "did not find each other"
# One process cannot be reached; this advice follows its name.
CHECK_ITS_HOST = "see whether its host is up"
CHECK_THAT_HOST = "see whether that host is up"
CHECK_ITS_NETWORK = "see whether its network is up"
UNREACHED = (CHECK_ITS_HOST, CHECK_THAT_HOST, CHECK_ITS_NETWORK)
ABOUT_OTHERS = (BAD_INPUT_ELSEWHERE, NOT_ALL_CAME, *UNREACHED)
# The runtime's message follows; its words tell whether another process failed.
CANNOT_JOIN = "cannot join the other processes: "
