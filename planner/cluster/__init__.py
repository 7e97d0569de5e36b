"""A cluster: its hosts, its devices and its measured links, and the file that keeps them.

cluster.py         a cluster, and the shares of its peak rates that are reached
cluster_file.py    its file
values.py          its values one by one, and their units
hostlist.py        lists of hosts with brackets
link_values.py     its links
array_file.py      the matrices of links beside it
device_sheets.py   what the planner knows of a device; the share of its memory that a plan may use
products.py        seconds of a matrix product on a device, from its shape
variants.py        clusters like a given one: other hosts, links or devices
link_fit.py        fits of a link to its messages' times, and of links that were not measured
trunks.py          uplinks that several hosts share
rails.py           NICs of one number in all hosts, joined by a switch
"""
