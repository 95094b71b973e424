"""Every stable code of the program in one table: what it means, an example, and where it comes from.

`titan-plan explain CODE` reads it. The codes of rules are taken from `RULES`, so that a rule is told in one place.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Final

from cost_models.errors import TitanPlanError
from cost_models.rules import RULES

KINDS: Final = {
    "M1": "memory",
    "D2": "divisibility",
    "T3": "topology",
    "S4": "schedule",
    "B5": "batch",
    "C6": "config",
    "R7": "runtime",
}
"""First two characters of a code and what it is about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """One code and its meaning.

    Attributes:
        code: a letter and three digits.
        title: the meaning in a few words.
        explanation: why it is refused, in general.
        example: an input that is refused with it.
        source: document or file that the refusal comes from.
    """

    code: str
    title: str
    explanation: str
    example: str
    source: str

    def __post_init__(self) -> None:
        if self.code[:2] not in KINDS:
            raise ValueError(f"{self.code} starts with none of {', '.join(KINDS)}")

    @property
    def kind(self) -> str:
        """What the code is about, such as `memory`."""
        return KINDS[self.code[:2]]


def find_code(code: str) -> Code:
    """A code in any case of letters."""
    found = CODES.get(code.strip().upper())
    if found is None:
        near = difflib.get_close_matches(code.strip().upper(), CODES, 3, 0.6)
        raise TitanPlanError("C611", f"unknown code {code[:20]!r}", f"nearest: {', '.join(near or list(CODES)[:3])}")
    return found


_CLUSTER: Final = "cost_models/cluster.py: what nodes and tiers hold"
_FILES: Final = "cost_models/yaml_files.py: how every file is read"
_VALUES: Final = "cost_models/model_files.py, cost_models/yaml_numbers.py: how every value is read"
_SIMULATOR: Final = "cost_models/pipeline_simulator.py"

_OTHER_CODES: Final = (
    Code(
        code="M101",
        title="does not fit the device",
        explanation="The peak of the worst rank, with buffers and fragmentation, is above what the device has.",
        example="a 70B model with ZeRO-0 on one device of 64 GiB",
        source="cost_models/memory.py",
    ),
    Code(
        code="M102",
        title="does not fit the host",
        explanation="Optimizer states and activations swapped out of all devices of a node need its host memory.",
        example="swap_optimizer for 100B parameters on one node of 1 TiB",
        source="cost_models/memory.py, cost_models/prediction.py",
    ),
    Code(
        code="T301",
        title="not a number of devices",
        explanation="A job and a node have at least one device.",
        example="--npus 0",
        source=_CLUSTER,
    ),
    Code(
        code="T302",
        title="more devices than the cluster has",
        explanation="Some machines end: a super-node of 384 devices without a network behind it has no 385th.",
        example="512 devices of cloudmatrix384",
        source=_CLUSTER,
    ),
    Code(
        code="T303",
        title="devices are not whole nodes",
        explanation="Schedulers hand out whole nodes, and a group's bandwidth depends on its place in the node.",
        example="63 devices in nodes of 8",
        source=_CLUSTER,
    ),
    Code(
        code="T304",
        title="devices do not divide a node",
        explanation="Below one node the devices must divide it, so that jobs beside each other see equal links.",
        example="3 devices of a node of 8",
        source=_CLUSTER,
    ),
    Code(
        code="T305",
        title="the device does not compute in this precision",
        explanation="Ascend 910A and V100 have no bf16 matrix unit; a silent fp16 would train something else.",
        example="precision bf16 on the 910A",
        source="cost_models/cluster.py: peaks of the device table",
    ),
    Code(
        code="T306",
        title="no network between nodes",
        explanation="The bandwidth between nodes can be set only where a tier of unbounded size exists.",
        example="an inter-node bandwidth for a single super-node",
        source=_CLUSTER,
    ),
    Code(
        code="T307",
        title="direct links do not grow",
        explanation="A full mesh of 8 devices has 7 links each; a node of 16 would need links that nobody built.",
        example="16 devices per node of atlas-800t-a2",
        source=_CLUSTER,
    ),
    Code(
        code="T308",
        title="members of a group do not nest",
        explanation="Ranks of a group are given near to far, each axis a multiple of the one inside it.",
        example="axes of stride 3 after 2 ranks",
        source="cost_models/topology.py",
    ),
    Code(
        code="T309",
        title="the library has no such algorithm",
        explanation="HCCL_ALGO and NCCL_ALGO name an algorithm of the library that serves the outermost links.",
        example="comm_algorithm mesh over RoCE",
        source="HCCL and NCCL environment variables; configs/clusters/",
    ),
    Code(
        code="S404",
        title="stage_layers has an unsupported shape",
        explanation="All virtual stages hold the same number of layers; only the first and the last may hold fewer.",
        example="stage_layers [10, 8, 12, 10]",
        source="cost_models/layout.py: short_first and short_last",
    ),
    Code(
        code="S405",
        title="stage times do not match the stages",
        explanation="The pipeline simulator needs one time of each kind for each virtual stage.",
        example="3 forward times for 4 stages",
        source=_SIMULATOR,
    ),
    Code(
        code="S406",
        title="the schedule waits for itself",
        explanation="Each rank waits for work that no rank can start: the action lists contradict each other.",
        example="rank 0 at a backward whose forward comes later",
        source=_SIMULATOR,
    ),
    Code(
        code="C601",
        title="unknown model",
        explanation="The name, or family and size, is not in the catalogue and is not a path.",
        example="--model llama2-71b",
        source="configs/models/; `titan-plan models` lists all",
    ),
    Code(
        code="C602",
        title="unknown cluster",
        explanation="The name is not in the catalogue and is not a path.",
        example="--cluster atlas-9000",
        source="configs/clusters/; `titan-plan clusters` lists all",
    ),
    Code(
        code="C603",
        title="file cannot be read",
        explanation="It is missing, a folder, empty, not UTF-8 text, or not ours to read.",
        example="--config missing.yaml",
        source=_FILES,
    ),
    Code(
        code="C604",
        title="text is broken",
        explanation="YAML or JSON that does not parse, or a key given twice: YAML would silently keep the last.",
        example="`lr: [1e-4` without its bracket",
        source=_FILES,
    ),
    Code(
        code="C605",
        title="unknown key",
        explanation="A key that nothing reads would be a setting that silently does nothing.",
        example="tensor_size instead of tp_size",
        source=_VALUES,
    ),
    Code(
        code="C606",
        title="value of the wrong kind",
        explanation="A number, text, flag, list or section is needed, and something else was given.",
        example="n_layers: many",
        source=_VALUES,
    ),
    Code(
        code="C607",
        title="architecture not supported",
        explanation="Only architectures whose parameter counts were checked are read from a config.json.",
        example="model_type mamba",
        source="cost_models/hf_config.py",
    ),
    Code(
        code="C608",
        title="required key missing",
        explanation="The value has no default and cannot be derived from the others.",
        example="a model file without hidden_dim",
        source=_VALUES,
    ),
    Code(
        code="C609",
        title="key in another unit",
        explanation="Units stand in keys and are not guessed: GiB is 2^30 bytes, GB is 10^9.",
        example="memory_gb instead of memory_gib",
        source="cost_models/yaml_numbers.py",
    ),
    Code(
        code="C610",
        title="impossible value",
        explanation="The kind is right, but no model, device, cluster or run has such a value.",
        example="tp_size: 0",
        source="the checks of each frozen value",
    ),
    Code(
        code="C611",
        title="name is not one of the choices",
        explanation="The value is a name out of a fixed list, which the hint shows.",
        example="precision: bf61",
        source="the lists beside each type, such as PRECISIONS in cost_models/workload.py",
    ),
    Code(
        code="C612",
        title="unknown device",
        explanation="The device of a cluster file is neither in the device table nor described in place.",
        example="device: 910b33",
        source="configs/clusters/devices.yaml",
    ),
    Code(
        code="C613",
        title="no calibration for this device",
        explanation="Times need fitted constants of the device, and none are shipped for it.",
        example="a cluster of a device that the user described",
        source="configs/calibrations/",
    ),
    Code(
        code="C614",
        title="shipped configs are damaged",
        explanation="They are not installed, or two files of the catalogue claim one name.",
        example="a wheel built without configs/",
        source="cost_models/resources.py",
    ),
    Code(
        code="C615",
        title="keys exclude each other",
        explanation="Two keys say the same thing in two ways, and neither would clearly win.",
        example="model: name beside hf_config",
        source="runtime/config_model.py",
    ),
    Code(
        code="C616",
        title="override is not KEY=VALUE",
        explanation="--set takes a dotted key and a value: --set training.lr=1e-4.",
        example="--set training.lr",
        source="runtime/config_overrides.py",
    ),
    Code(
        code="C617",
        title="wrong use of the command line",
        explanation="An option or verb that does not exist, a missing one, or a value that it does not take.",
        example="titan-plan --model 70B, without --npus",
        source="planner/cli",
    ),
    Code(
        code="R710",
        title="interrupted",
        explanation="The program was stopped from outside; files are whole, old or new.",
        example="Ctrl-C during a long search",
        source="planner/cli",
    ),
    Code(
        code="C620",
        title="unknown data set",
        explanation="The name is neither built in, nor a file or folder here, nor a data set of the Hub.",
        example="dataset: llama2_chinese, and no folder of that name",
        source="runtime/data/sources.py; docs/data.md",
    ),
    Code(
        code="C621",
        title="too little data",
        explanation="No file of a known kind, no text in the files, or fewer tokens than one sequence needs.",
        example="a folder of .pdf files",
        source="runtime/data/sources.py, runtime/data/sequences.py; docs/data.md",
    ),
    Code(
        code="C622",
        title="data file is broken",
        explanation="A line or row is not what the file's ending promises; skipping it would train on other data.",
        example="line 3 of a .jsonl file without the key text",
        source="runtime/data/documents.py, runtime/data/tables.py; docs/data.md",
    ),
    Code(
        code="C623",
        title="tokenizer cannot be used",
        explanation="It is missing, broken, or does not say which token ends a document.",
        example="tokenizer: ./llama2, a folder without tokenizer.json",
        source="runtime/data/tokenizer.py; docs/data.md",
    ),
    Code(
        code="C624",
        title="tokens do not fit the vocabulary",
        explanation="A token at or above vocab_size has no row in the embedding; devices fail on it without a place.",
        example="a tokenizer of 32000 tokens for a model with vocab_size 512",
        source="runtime/data/dataset.py",
    ),
    Code(
        code="C625",
        title="optional library missing",
        explanation="Some data need a library that is not installed with titan-plan, since most runs do without.",
        example="dataset: hf:ORG/NAME without the library datasets",
        source="runtime/data/remote.py, runtime/data/tokenizer.py",
    ),
    Code(
        code="C626",
        title="download failed",
        explanation="The datasets library could not load the data set from the Hub.",
        example="dataset: hf:ORG/NAME on a machine without a network",
        source="runtime/data/remote.py",
    ),
    Code(
        code="C627",
        title="plan of another version",
        explanation="What another titan-plan predicted says nothing about the trainer of this one.",
        example="dry-run of a run folder that was written before an update",
        source="planner/dry_setting.py",
    ),
    Code(
        code="R740",
        title="token cache cannot be written",
        explanation="Tokens are kept in a file that every rank and every later run maps into its memory.",
        example="an output folder that this user may not write",
        source="runtime/data/token_cache.py; docs/data.md",
    ),
    Code(
        code="R741",
        title="token cache is damaged",
        explanation="The file holds a token that the model does not have, though it had none when it was written.",
        example="a cache file that was changed by hand",
        source="runtime/data/sequences.py",
    ),
    Code(
        code="R720",
        title="this machine is too small for the plan",
        explanation="A launch needs a device for each rank; ranks on a CPU share cores, up to four a core, and memory.",
        example="a plan for 64 devices on a machine with 8",
        source="runtime/launch_guard.py",
    ),
    Code(
        code="R721",
        title="a rank failed",
        explanation="The run ended because one rank did; its last words are shown, its whole log is named.",
        example="a rank that runs out of device memory in its first step",
        source="runtime/launch.py, runtime/launch_failure.py",
    ),
    Code(
        code="R722",
        title="the launch failed before training",
        explanation="No rank got as far as training: torchrun, the device or its library could not start.",
        example="torch_npu without CANN where NPUs are asked for",
        source="runtime/launch.py, runtime/device_training.py",
    ),
    Code(
        code="R723",
        title="the port is taken",
        explanation="Ranks meet in a store on this port; torchrun would take a stranger's for its own, and wait.",
        example="--master-port 29500 while another run has it",
        source="runtime/launch_command.py",
    ),
    Code(
        code="R760",
        title="nobody answers at the master",
        explanation="Every rank first connects to MASTER_ADDR:MASTER_PORT; nobody is there, or a firewall closes it.",
        example="MASTER_ADDR of a node that is not started",
        source="runtime/connection_faults.py; users' guide, Q3",
    ),
    Code(
        code="R761",
        title="a port is taken",
        explanation="The master listens on MASTER_PORT and HCCL on its own ports; another process has one of them.",
        example="a second run on the same node with the same MASTER_PORT",
        source="runtime/connection_faults.py; HCCL EI0019, EI0020",
    ),
    Code(
        code="R762",
        title="some ranks did not come",
        explanation="Ranks wait for each other when groups are made; one was not started, failed, or is cut off.",
        example="three nodes asked for, two started",
        source="runtime/connection_faults.py; HCCL EI0006, EI0015",
    ),
    Code(
        code="R763",
        title="a rank went away during training",
        explanation="A process ended, or its node or link failed, while others were waiting for what it sends.",
        example="a rank that the kernel killed for its memory",
        source="runtime/connection_faults.py; HCCL EI0012, EI0013",
    ),
    Code(
        code="R764",
        title="a collective took too long",
        explanation="A rank did not come to a collective within its time limit: it hangs, or does something else.",
        example="a rank that waits for a stalled file system",
        source="runtime/connection_faults.py; HCCL EI0002",
    ),
    Code(
        code="R765",
        title="the network interface does not exist",
        explanation="GLOO_SOCKET_IFNAME or HCCL_SOCKET_IFNAME names an interface that this node does not have.",
        example="GLOO_SOCKET_IFNAME=eth77",
        source="runtime/connection_faults.py",
    ),
    Code(
        code="R766",
        title="not started by a launcher",
        explanation="RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT come from torchrun; one of them is not set.",
        example="a run of two ranks without torchrun",
        source="runtime/connection_faults.py",
    ),
    Code(
        code="R769",
        title="communication failed",
        explanation="A library of collectives failed with words that are not in our table.",
        example="a new error code of HCCL",
        source="runtime/connection_faults.py",
    ),
    Code(
        code="R750",
        title="the loss is not finite",
        explanation="Training on would spread the bad numbers to every weight, so the run ends.",
        example="an overflow in fp16 with a fixed loss scale",
        source="runtime/faults.py; users' guide, Q2",
    ),
    Code(
        code="R751",
        title="out of memory while training",
        explanation="The device has less than the layout needs; what saves memory is tried in the order of the guide.",
        example="micro_batch_size 8 without gradient_checkpointing",
        source="runtime/faults.py; users' guide, Q1",
    ),
    Code(
        code="R752",
        title="no room for a checkpoint",
        explanation="The disk or the quota of the user is full; the checkpoint before stays whole.",
        example="checkpoint.keep 20 of a 70B model",
        source="runtime/faults.py",
    ),
    Code(
        code="R753",
        title="the output folder cannot be written",
        explanation="Metrics and checkpoints go to training.output_dir, a folder that the run may write.",
        example="output_dir below a file",
        source="runtime/metrics_files.py",
    ),
    Code(
        code="C650",
        title="bound of the search is malformed",
        explanation="--fix and --max take names of degrees with values that can be met at once.",
        example="--fix tp=4 --max tp=2",
        source="planner/bounds.py",
    ),
    Code(
        code="C660",
        title="no Hugging Face form",
        explanation="Weights are read and written only for architectures that compute what our decoder computes.",
        example="training.checkpoint.load names a folder with a DeepSeek or a quantised model",
        source="runtime/hf_names.py, runtime/hf_folder.py",
    ),
    Code(
        code="C661",
        title="folder of weights is incomplete",
        explanation="Every tensor of the model must stand in the safetensors files beside config.json.",
        example="a download that stopped before its last file",
        source="runtime/hf_folder.py",
    ),
    Code(
        code="C662",
        title="weights of another model",
        explanation="Sizes, biases, rotary base and norm epsilon of config.json must be those of the run.",
        example="weights of Llama 2 7B for a run of 13B",
        source="runtime/hf_folder.py",
    ),
    Code(
        code="C663",
        title="checkpoint cannot be exported",
        explanation="An export reads one whole step of a run, with the config.yaml that it was trained with.",
        example="--checkpoint names a folder without a step-XXXXXXXX",
        source="runtime/hf_writing.py, runtime/hf_export.py",
    ),
    Code(
        code="C664",
        title="export cannot be written",
        explanation="The folder of an export appears whole or not at all, and never replaces another.",
        example="an output folder that is there already",
        source="runtime/hf_writing.py",
    ),
    Code(
        code="C618",
        title="checkpoint of another model",
        explanation="A run resumes from the newest checkpoint of its folder, and the model there must be the config's.",
        example="hidden_dim 512 where the checkpoint in output_dir has 256",
        source="runtime/checkpoint_record.py",
    ),
    Code(
        code="C619",
        title="checkpoint does not fit the run",
        explanation="Optimizers keep different state, and a later titan-plan may write what this one cannot read.",
        example="optimizer sgd where the checkpoint has the state of adamw",
        source="runtime/checkpoint_record.py",
    ),
    Code(
        code="R780",
        title="compile needs AutoFuse",
        explanation="On NPUs torch.compile goes through AutoFuse, which is a package of its own.",
        example="compile: true where inductor_npu_ext is not installed",
        source="runtime/checks.py",
    ),
    Code(
        code="R781",
        title="split backward cannot be compiled",
        explanation="zero-bubble schedules compute the gradients of weights apart, which torch refuses to compile.",
        example="compile: true with schedule zero-bubble",
        source="runtime/checks.py; torch 2.13 _check_torch_compile_compatibility",
    ),
    Code(
        code="R782",
        title="torch.compile failed",
        explanation="The compiler gave up on a layer; nothing else of the run is at fault.",
        example="a compiler without a C++ toolchain",
        source="runtime/compiling.py",
    ),
    Code(
        code="R754",
        title="checkpoint cannot be read",
        explanation="A file is damaged or holds what no checkpoint holds; nothing of it is executed.",
        example="a file of tensors that was copied in part",
        source="runtime/checkpoint_storage.py, runtime/checkpoint_files.py",
    ),
    Code(
        code="R755",
        title="checkpoint could not be written",
        explanation="Anything but a full disk, such as a read-only folder; the checkpoint before stays whole.",
        example="output_dir on a disk that was unmounted",
        source="runtime/checkpoint.py",
    ),
    Code(
        code="R756",
        title="nodes do not share the disk of checkpoints",
        explanation="Every rank writes its part, and rank 0 must see all of them before it calls a checkpoint whole.",
        example="output_dir in /tmp with two nodes",
        source="runtime/checkpoint_files.py",
    ),
)


def _of_rules() -> tuple[Code, ...]:
    return tuple(
        Code(code=r.code, title=r.title, explanation=r.explanation, example=r.example, source=r.source) for r in RULES
    )


ALL_CODES: Final[tuple[Code, ...]] = tuple(sorted((*_of_rules(), *_OTHER_CODES), key=lambda code: code.code[1:]))
"""Sorted by number; a test holds that no code stands here twice and that each is raised somewhere."""

CODES: Final[dict[str, Code]] = {code.code: code for code in ALL_CODES}
