"""Lists of hosts, as `scontrol show hostnames` and ClusterShell's nodeset expand them."""

import pytest

from paxtrain.errors import UserError
from planner.cluster import hostlist


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["a", "b-1.site"], ["a", "b-1.site"]),
        (["node[001-003]"], ["node001", "node002", "node003"]),
        (["n[9-11,2],login"], ["n9", "n10", "n11", "n2", "login"]),
        (["r[1-2]n[01-02]-ib"], ["r1n01-ib", "r1n02-ib", "r2n01-ib", "r2n02-ib"]),
        (["n[1", "3]"], ["n1", "n3"]),  # a flag's list, split at its commas
    ],
)
def test_hostlists_are_expanded(names, found):
    assert hostlist.expand(names) == found


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("n[a-b]", "have 'a-b' where numbers or ranges should be, as in"),
        ("n[4-1]", "have '4-1' where"),
        ("n[]", "have '' where"),
        ("n[1-3", "lack a ]"),
        ("n[1-99999999]", "have '1-99999999' where"),
        ("a[1-9999]b[1-9999]c[1-9999]", "are more than 100,000"),
    ],
)
def test_what_is_no_hostlist_is_one_sentence(name, words):
    with pytest.raises(UserError, match=words):
        hostlist.expand([name])
