"""Rails: the k-th NICs of all hosts, which one leaf switch joins.

Device i of a host uses NIC i * nics // devices_per_host. So devices with the same number in their hosts are one switch
apart (NVIDIA's DGX SuperPOD: "traffic per rail of the DGX H100 systems is always one hop away from the other 31 nodes",
https://docs.nvidia.com/dgx-superpod/reference-architecture-scalable-infrastructure-h100/latest/network-fabrics.html).
A flow between devices of different rails takes one of two ways.

    PXN      it goes over NVLink to the sender's neighbor with the receiver's rail, and from there along that rail. That
             is what NCCL does with sends by default (NCCL_P2P_PXN_LEVEL=2,
             https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html).
    spine    it leaves by its own NIC, and the spine carries it to the other rail's leaf switch.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Rails:
    """The ways of flows that change rails.

    Attributes:
        pxn: they are moved inside the sender's host first, and no flow crosses the spine.
        oversubscription: ports of a leaf switch to hosts over its ports to the spine.
    """

    pxn: bool = True
    oversubscription: float = 1.0
