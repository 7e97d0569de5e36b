"""Phrases of error messages that are about other processes than the one that prints them.

The modules that raise such errors write these phrases, and the supervisor finds them in a worker's last words, so that
it does not blame the worker. This module imports nothing, since a supervisor does without jax.
"""

# Another process has found bad input, and all end.
BAD_INPUT_ELSEWHERE = "its own output says what"
# Not all processes have come.
NOT_ALL_CAME = "did not find each other"
# One process cannot be reached: advice that follows its name.
CHECK_ITS_HOST = "see whether its host is up"
CHECK_THAT_HOST = "see whether that host is up"
CHECK_ITS_NETWORK = "see whether its network is up"
UNREACHED = (CHECK_ITS_HOST, CHECK_THAT_HOST, CHECK_ITS_NETWORK)
ABOUT_OTHERS = (BAD_INPUT_ELSEWHERE, NOT_ALL_CAME, *UNREACHED)
# The runtime's own words follow, which tell whether it is about others.
CANNOT_JOIN = "cannot join the other processes: "
