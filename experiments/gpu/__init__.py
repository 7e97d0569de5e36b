"""Measurements on GPUs: `python -m experiments.gpu`, or `make gpu`.

Every part of a section runs in a process of its own, at full size on GPUs and at toy size on CPUs. Sizes are data.

    section.py           parts, sections, and their records on disk
    running.py           processes of the parts, within budgets of time
    page.py              the page made of all records
    correctness.py       losses and gradients beside the CPU's; bit-equal resume
    throughput.py        tokens/s, MFU and bytes, beside a plain jit
    kernels.py           kernels of the compression
    breakdown.py         a traced step beside the ledger's estimate
    many.py              several GPUs: schedules, overlap, links
    prediction.py        predicted memory and step beside the measured ones, and constants fitted anew
    options.py           options of XLA, one by one
    virtual_stages.py    virtual stages on one GPU: bytes against loss
"""
