"""Made-up runs of a training step on one GPU, whose seconds are known, and their traces as profilers write them."""

import dataclasses
import json
import sqlite3

MAIN, AUTOGRAD = 11, 22  # threads


@dataclasses.dataclass
class Run:
    """A run of some steps, each of some micro-batches, of which every kernel's operators and seconds are known.

    Attributes:
        layers: layers.
        passes: micro-batches of a step.
        steps: steps.
        every: seconds between launches.
        head: whether it has an embedding, a head and a loss.
        again: operators of F that B runs again before a layer's B.
        collective: seconds of a collective after a layer's F; 0: none.
    """

    layers: int = 3
    passes: int = 2
    steps: int = 2
    every: float = 5e-6
    head: bool = True
    again: tuple[str, ...] = ()
    collective: float = 0.0
    # Seconds of kernels.
    forward: float = 1e-3
    backward: float = 2.2e-3
    logits: float = 4e-4
    optimizer: float = 7e-4

    def __post_init__(self) -> None:
        self.operators: list[tuple[str, int, float, float]] = []  # name, thread, start, end
        self.kernels: list[tuple[str, int, float, float, float]] = []  # name, thread, launch, start, end
        self.windows: list[tuple[float, float]] = []
        self._host = self._device = 1.0
        for _ in range(self.steps):
            self._step()

    def _launch(self, kernel: str, seconds: float, *around: str, thread: int = MAIN) -> None:
        begin = self._host
        self._host += self.every
        launched = self._host - self.every / 2
        self._device = max(self._device, launched + 3e-6)
        self.kernels.append((kernel, thread, launched, self._device, self._device + seconds))
        self._device += seconds
        self.operators += [
            (name, thread, begin + i * 1e-9, self._host - (i + 1) * 1e-9) for i, name in enumerate(around)
        ]

    def _backward(self, kernel: str, seconds: float, node: str, *around: str) -> None:
        names = f"autograd::engine::evaluate_function: {node}", node, *around
        self._launch(kernel, seconds, *names, thread=AUTOGRAD)

    def _step(self) -> None:
        begin = self._host
        for _ in range(self.passes):
            self._pass()
        self._launch("multi_tensor_norm", 1e-4, "aten::_foreach_norm")
        self._launch("multi_tensor_adamw", self.optimizer, "Optimizer.step#AdamW.step", "aten::_fused_adamw_")
        self._host = self._device + 1e-4
        self.windows.append((begin, self._host))

    def _pass(self) -> None:
        if self.head:
            self._launch("embedding_kernel", 5e-5, "aten::embedding")
        for _ in range(self.layers):
            self._launch("gemm", self.forward * 0.75, "aten::linear", "aten::addmm")
            self._launch("gelu", self.forward * 0.25, "aten::gelu")
            if self.collective:
                self._launch("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", self.collective, "c10d::allreduce_")
        if self.head:
            self._launch("logits_gemm", self.logits, "aten::linear", "aten::matmul", "aten::mm")
            self._launch("softmax", 1e-4, "aten::cross_entropy_loss", "aten::log_softmax")
            self._backward("nll", 1e-4, "NllLossBackward0")
            self._backward("logits_gemm", 2 * self.logits, "MmBackward0", "aten::mm")
        for _ in range(self.layers):
            for name in self.again:
                self._backward("again", self.forward / len(self.again), "AddmmBackward0", name)
            self._backward("gelu", self.backward * 0.25, "GeluBackward0", "aten::gelu_backward")
            self._backward("gemm", self.backward * 0.75, "AddmmBackward0", "aten::mm")
        if self.head:
            self._backward("embedding_gradient", 1e-4, "EmbeddingBackward0", "aten::embedding_dense_backward")
        self._host = max(self._host, self._device)  # as a step that reads its loss

    def torch(self, steps: bool = True, device: str = "NVIDIA H100 80GB HBM3") -> dict:
        """Return the trace of torch.profiler.

        Args:
            steps: whether it marks steps.
            device: the device's name.
        """
        found = []

        def event(cat: str, name: str, place: tuple, start: float, end: float, **arguments: object) -> None:
            times = {"ts": round(start * 1e6, 3), "dur": round((end - start) * 1e6, 3)}
            found.append(
                {"ph": "X", "cat": cat, "name": name, "pid": place[0], "tid": place[1], **times, "args": arguments}
            )

        for number, (start, end) in enumerate(self.windows if steps else ()):
            event("user_annotation", f"ProfilerStep#{number}", (7, MAIN), start, end)
        for name, thread, start, end in self.operators:
            event("user_annotation" if "#" in name else "cpu_op", name, (7, thread), start, end)
        for number, (name, thread, launched, start, end) in enumerate(self.kernels):
            event("cuda_runtime", "cudaLaunchKernel", (7, thread), launched, launched + 2e-6, correlation=number)
            event("kernel", name, (0, 7), start, end, correlation=number, device=0, stream=7)
        return {
            "schemaVersion": 1,
            "deviceProperties": [{"id": 0, "name": device}],
            "traceEvents": [
                {"ph": "M", "name": "process_name", "pid": 7, "tid": 0, "args": {"name": "python"}},
                *found,
            ],
        }

    def nsys(self, path, ranges: bool = True, threads: bool = True, device: str = "NVIDIA H100 80GB HBM3") -> None:
        """Write the sqlite export of Nsight Systems.

        Args:
            path: file to write.
            ranges: whether it has an NVTX range for each operator.
            threads: whether it has the names of threads.
            device: the device's name.
        """
        process = 99 << 24
        names = ["python", "pt_autograd_0", *sorted({kernel[0] for kernel in self.kernels})]
        with sqlite3.connect(path) as base:
            base.executescript(
                "CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT NOT NULL);"
                "CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, end INTEGER, deviceId INTEGER,"
                " contextId INTEGER, streamId INTEGER, correlationId INTEGER, globalPid INTEGER, shortName INTEGER);"
                "CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER, end INTEGER, eventClass INTEGER,"
                " globalTid INTEGER, correlationId INTEGER, nameId INTEGER, returnValue INTEGER);"
                "CREATE TABLE NVTX_EVENTS (start INTEGER, end INTEGER, eventType INTEGER, rangeId INTEGER, text TEXT,"
                " globalTid INTEGER, textId INTEGER);"
                "CREATE TABLE ThreadNames (nameId INTEGER, priority INTEGER, globalTid INTEGER);"
                "CREATE TABLE TARGET_INFO_GPU (id INTEGER, name TEXT);"
            )
            base.executemany("INSERT INTO StringIds VALUES (?, ?)", enumerate(names))
            base.execute("INSERT INTO TARGET_INFO_GPU VALUES (0, ?)", (device,))
            for number, (name, thread, launched, start, end) in enumerate(self.kernels):
                ns = [round(time * 1e9) for time in (launched, launched + 2e-6, start, end)]
                base.execute(
                    "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, 0, ?, ?, 0, 0)",
                    (*ns[:2], process | thread, number),
                )
                base.execute(
                    "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, 0, 1, 7, ?, ?, ?)",
                    (*ns[2:], number, process, names.index(name)),
                )
            if ranges:
                for name, thread, start, end in self.operators:
                    base.execute(
                        "INSERT INTO NVTX_EVENTS VALUES (?, ?, 59, NULL, ?, ?, NULL)",
                        (round(start * 1e9), round(end * 1e9), name, process | thread),
                    )
            if threads:
                base.executemany(
                    "INSERT INTO ThreadNames VALUES (?, 0, ?)", [(0, process | MAIN), (1, process | AUTOGRAD)]
                )
        base.close()

    def xla(self, scanned: bool = True, loop_of_passes: bool = False) -> dict:
        """Return the trace of jax.profiler of such a run, compiled.

        Args:
            scanned: whether layers are in a loop.
            loop_of_passes: whether micro-batches are in a loop.
        """
        outer = "while/body/" * loop_of_passes
        found = [
            {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "/device:GPU:0"}},
            {"ph": "M", "name": "thread_name", "pid": 1, "tid": 2, "args": {"name": "Stream #13(Compute)"}},
            {"ph": "M", "name": "thread_name", "pid": 1, "tid": 3, "args": {"name": "XLA Ops"}},
        ]
        for name, thread, _, start, end in self.kernels:
            loop = "while/body/" if scanned and name in ("gelu", "gemm") else ""
            path = {MAIN: f"jit(step)/{outer}jvp(m)/", AUTOGRAD: f"jit(step)/{outer}transpose(jvp(m))/"}[thread]
            if name.startswith("multi_tensor"):
                path = "jit(step)/optimizer/"
            arguments = {"hlo_module": "jit_step", "hlo_op": f"{name}.1", "name": f"{path}{loop}{name}"}
            times = {"ts": start * 1e6, "dur": (end - start) * 1e6}
            for line in (2, 3):  # the second says the same, summed up
                found.append({"ph": "X", "name": name, "pid": 1, "tid": line, **times, "args": arguments})
        return {"traceEvents": found}


def write(path, values: object) -> None:
    """Write JSON."""
    path.write_text(json.dumps(values))
