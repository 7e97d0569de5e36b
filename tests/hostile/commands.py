"""The mains with command lines that work, of which the cases are made."""

import dataclasses

from tests.hostile.home import MODEL


@dataclasses.dataclass(frozen=True)
class Main:
    """A main and a command line of it that works. Of some fields, spaces part the names.

    Attributes:
        module: its dotted name.
        arguments: flags; {home} stands for the folder of the files.
        integers: flags whose values are whole numbers.
        numbers: flags whose values are numbers.
        texts: flags whose values are names, paths or lists.
        overrides: prefix of the overrides of a configuration, or "".
        files: patterns of the names of the files that it reads.
        skip: places ("module:attribute") where the work begins; ":attribute" is one of the main itself.
        positional: arguments that are no flags.
        codes: exit codes of answers, besides 0.
        compiles: whether it may compile before it refuses, as it reads arrays: fingerprints of a checkpoint's are
            computed, and safetensors makes arrays of jax.
        leaves: files in the folder of what it writes that a refusal may leave. Weights are read when the run has its
            folder, and the lock of a folder is never removed.
    """

    module: str
    arguments: dict[str, str]
    integers: str = ""
    numbers: str = ""
    texts: str = ""
    overrides: str = ""
    files: str = ""
    skip: tuple[str, ...] = ()
    positional: tuple[str, ...] = ()
    codes: tuple[int, ...] = ()
    compiles: bool = False
    leaves: tuple[str, ...] = ()


DATA = {f"config.data.{name}": f"{{home}}/{name}" for name in ("train", "validation")}
TRAINING = {"config": "{home}/config.py", "cpu_devices": "8", "config.run.out": "{out}/run"} | DATA
STUDY = DATA | {"config.mesh.tensor": "1", "config.compress.data.stages": "all", "config.compress.data.rank": "8"}
SCHEDULE = {"config.pipeline.schedule": "{home}/schedule.csv"}
INITIAL = {f"config.model.{name}": str(value) for name, value in MODEL.items()}
PLAN = {"model": "{home}/config.py", "cluster": "{home}/cluster.json", "out": "{out}/plan", "oracle": "no", "top": "3"}
SEARCH = ("planner.search.search:Search.run",)  # all candidates are known and bounded by then
LAUNCH = {"config": "{home}/config.py", "nodes": "2"}
LAUNCHED = "nodes gpus_per_node max_restarts signal_ahead hosts cpu_devices min_nodes"
MAINS = (
    Main(
        "paxtrain.train",
        TRAINING,
        integers="cpu_devices num_processes process_id",
        numbers="coordinator_timeout lost_timeout hang_timeout",
        texts="config plan coordinator",
        overrides="config",
        files="config.py train.idx train.bin tokenizer.json",
        skip=("paxtrain.run.run:Run.train",),
    ),
    Main(
        "paxtrain.train",
        TRAINING | {"plan": "{home}/plan.json"},
        texts="plan",
        files="plan.json",
        skip=("paxtrain.run.run:Run.train",),
    ),
    Main(
        "paxtrain.train",
        TRAINING | {"config": "{home}/config.json"},
        files="config.json",
        skip=("paxtrain.run.run:Run.train",),
    ),
    Main(
        "paxtrain.train",
        TRAINING | {"config.init": "{home}/model"} | INITIAL,
        texts="config.init",
        files="model/*",
        skip=("paxtrain.parallel.step:Trainer.from_params", "paxtrain.parallel.step:Trainer.init"),
        compiles=True,
        leaves=("run/lock",),
    ),
    Main(
        "planner.plan",
        PLAN,
        integers="global_batch top placed seed tensor_hosts",
        numbers="gain usable_memory quantile",
        texts="model cluster without constants constants_of compress backward_ranks data_ranks "
        "tensor pipe micro_batch virtual_stages schedules saves out",
        overrides="model",
        files="config.py cluster.json",
        skip=SEARCH,
    ),
    Main(
        "planner.launch",
        LAUNCH,
        integers=LAUNCHED,
        texts="config plan out name time partition account sbatch setup",
        files="config.py",
        positional=("slurm",),
    ),
    Main(
        "planner.launch",
        LAUNCH | {"image": "registry/paxtrain:1"},
        integers=LAUNCHED,
        texts="config out name image volume mount setup",
        positional=("kubernetes",),
    ),
    Main(
        "planner.launch",
        {"config": "{home}/config.py", "hosts": "2", "out": "{out}/job"},
        integers="hosts cpu_devices max_restarts",
        texts="config out",
        skip=("planner.jobs.local:Local.run",),
        positional=("local",),
    ),
    Main(
        "planner.validate",
        {"trials": "{home}/trials.csv", "out": "{out}/validate"},
        integers="fit folds seed seeds",
        texts="trials hold_out method out",
        files="trials.csv",
        skip=(":validate",),
    ),
    Main(
        "planner.profile",
        {"config": "{home}/config.py", "out": "{out}/cluster.json"},
        integers="repeats compute_hosts cpu_devices",
        numbers="time_limit answer_timeout peak",
        texts="sizes micro_batches tensor out name coordinator",
        overrides="config",
        skip=("paxtrain.process.distributed:initialize",),
    ),
    Main(
        "planner.run",
        {"config": "{home}/config.py", "out": "{out}/run", "num_processes": "1", "cpu_devices": "8"},
        integers="gpus cpu_devices compute_hosts",
        numbers="profile_seconds profile_age answer_timeout lost_timeout hang_timeout peak",
        texts="plan out host_name coordinator",
        overrides="config",
        files="config.py",
        skip=("paxtrain.process.distributed:initialize",),
    ),
    Main(
        "paxtrain.prepare",
        {"input": "{home}/text.txt", "out": "{out}/data"},
        integers="vocab_size seed",
        numbers="validation_fraction",
        texts="input out tokenizer end_of_text begin_of_text vocab merges json_key",
        files="text.txt",
    ),
    Main(
        "paxtrain.prepare",
        {"input": "{home}/text.txt", "out": "{out}/data", "tokenizer": "bpe", "vocab_size": "300"},
        integers="vocab_size seed",
        numbers="validation_fraction",
        texts="tokenizer end_of_text",
        files="text.txt",
    ),
    Main(
        "paxtrain.prepare",
        {
            "input": "{home}/text.txt",
            "out": "{out}/data",
            "tokenizer": "gpt2",
            "vocab": "{home}/vocab.json",
            "merges": "{home}/merges.txt",
        },
        texts="vocab merges",
        files="vocab.json merges.txt",
    ),
    Main(
        "paxtrain.prepare",
        {
            "input": "{home}/lines.jsonl",
            "out": "{out}/data",
            "tokenizer": "{home}/own_tokenizer.json",
            "end_of_text": "<|endoftext|>",
        },
        texts="tokenizer end_of_text begin_of_text json_key",
        files="own_tokenizer.json lines.jsonl",
    ),
    Main(
        "paxtrain.compare",
        {"runs": "{home}/one,{home}/two", "out": "{out}/figure.png"},
        texts="runs out",
        files="one/metrics.jsonl",
    ),
    Main(
        "paxtrain.sample",
        {"checkpoint": "{home}/trained", "tokens": "4"},
        integers="step tokens top_k seed",
        numbers="temperature",
        texts="checkpoint prompt",
        files="trained/*.json trained/checkpoints/1/**/*",
        skip=("paxtrain.run.sampling:generate",),
        compiles=True,
    ),
    Main(
        "paxtrain.huggingface.__main__",
        {"checkpoint": "{home}/trained", "out": "{out}/exported"},
        integers="step",
        texts="checkpoint out dtype",
        files="trained/*.json trained/checkpoints/1/**/*",
        skip=("paxtrain.huggingface.exporting:_save",),
        positional=("export",),
        compiles=True,
    ),
    Main(
        "paxtrain.profile",
        {"config": "{home}/config.py", "cpu_devices": "8"} | SCHEDULE,
        integers="cpu_devices num_processes process_id steps",
        numbers="coordinator_timeout lost_timeout hang_timeout",
        texts="plan coordinator config.pipeline.schedule",
        files="schedule.csv",
        skip=(":profile",),
    ),
    Main(
        "paxtrain.study.__main__",
        {"config": "{home}/config.py", "out": "{out}/study"} | STUDY,
        integers="seeds steps workers",
        texts="ranks out",
        overrides="config",
        skip=("paxtrain.study.runs:Study.run",),
    ),
    Main(
        "planner.cluster_of",
        {
            "nccl_tests": "{home}/one.log,{home}/two.log",
            "topo": "{home}/matrix.topo",
            "slurm_topology": "{home}/topology.conf",
            "out": "{out}/cluster.json",
        },
        integers="nics",
        numbers="nic_gbit",
        texts="nccl_tests topo slurm_topology hosts device name out",
        files="one.log two.log matrix.topo topology.conf",
    ),
    Main(
        "planner.cluster_of",
        {
            "nccl_xml": "{home}/host.xml",
            "trace": "{home}/trace.json,{home}/trace.sqlite",
            "micro_batch": "1,2",
            "hosts": "2",
            "config": "{home}/config.py",
            "config.model.layers": "3",
            "out": "{out}/cluster.json",
        },
        integers="tensor layers passes",
        texts="nccl_xml trace micro_batch config",
        files="host.xml trace.json trace.sqlite",
    ),
    Main(
        "planner.convert",
        {},
        files="amp_homogeneous.json",
        positional=("{home}/amp_homogeneous.json", "{out}/trials.csv"),
    ),
    Main(
        "planner.plan",
        PLAN | {"cluster": "{home}/arrays.json", "constants": "{home}/constants.json"},
        integers="global_batch",
        texts="constants constants_of",
        files="arrays.json links.npz constants.json",
        skip=SEARCH,
    ),
    Main(
        "planner.plan",
        PLAN | {"compress": "auto", "probe": "{home}/probe.json"},
        numbers="loss_budget",
        texts="probe compress",
        files="probe.json",
        skip=("planner.planning.loss_budget:choose",),
    ),
    Main(
        "planner.plan",
        PLAN | {"schedules": "{home}/schedule.csv"},
        texts="schedules",
        files="schedule.csv",
        skip=SEARCH,
    ),
    Main(
        "planner.memory.__main__",
        {"model": "{home}/config.py", "cluster": "{home}/cluster.json"},
        integers="global_batch tensor_hosts top",
        numbers="usable_memory quantile",
        texts="cluster tensor pipe data micro_batch schedules saves",
        overrides="model",
        files="cluster.json",
        codes=(1,),
    ),
    Main(
        "planner.export.__main__",
        {"to": "megatron", "plan": "{home}/plan.json", "model": "{home}/config.py", "out": "{out}/export"},
        texts="to plan model out",
        overrides="model",
        files="plan.json",
    ),
    Main(
        "experiments.published.__main__",
        {"page": "{home}/page.md"},
        texts="page",
        files="page.md",
        skip=("experiments.published.runs:read",),
    ),
)
