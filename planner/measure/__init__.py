"""Measurement of a cluster by its own processes: its hosts, links and compute.

profile_cluster.py                          the whole profile
machines.py process_group.py                hosts and processes; small values between them without a collective
reachability.py                             test connections, before a collective can hang
profile_links.py link_timing.py             links
alike_links.py                              noise taken out of links that are alike
profile_trunks.py                           uplinks that several hosts share
profile_compute.py compute_timing.py        compute
options.py flags.py                         options; the flags of the mains that measure
"""
