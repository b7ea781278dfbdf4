"""Every config group as a dataclass: one line a field, with its meaning, unit and what zero or null does.

In: nothing. Out: the classes that Hydra composes into and that rl360.config.check re-merges the result into. The
components' constructors take the fields of their own class as keywords (without `_target_`), plus the collaborators
that rl360.engine.build passes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING


@dataclass
class ModelConfig:
    name: str = MISSING  # short name: also the folder under paths.models when path is null
    path: str | None = None  # HF checkpoint folder; null: paths.models/<name>, fetched by `rl360 model fetch`
    source: str | None = None  # where `model fetch` gets it: hub id, or null when it cannot be fetched
    revision: str | None = None  # pinned hub revision; null: the default branch
    tool_parser: str = "none"  # none | hermes (also called qwen25) | k2_horizon
    reasoning_parser: str = "none"  # none | qwen3 | k2_horizon
    max_context_tokens: int = 2048  # what the model was trained for; rollout.max_context_tokens may not exceed it
    fp32_logits: bool = True  # trainer and engine keep final logits in fp32; false: both round them to bf16
    random_init: bool = False  # true: the folder holds config and tokenizer only; weights from `seed` (tests)
    expect: dict[str, Any] | None = None  # what config.json must say, and num_parameters; null: any model will do


@dataclass
class AlgorithmConfig:
    _target_: str = "rl360.algorithms.grpo.GRPO"
    normalize_std: bool = False  # divide advantages by the group's standard deviation
    clip_low: float = 0.2  # ratio clipped below 1 - clip_low
    clip_high: float = 0.28  # ratio clipped above 1 + clip_high
    kl_coef: float = 0.0  # weight of the KL to the reference model; 0: no reference model is kept
    kl_estimator: str = "k3"  # k1 | k2 | k3
    reducer: str = "token_mean"  # token_mean | sequence_mean, over the global batch
    updates_per_batch: int = 1  # optimizer steps on one batch; 1: proximal = current, from the same forward
    importance_cap: float | None = 2.0  # truncation of proximal / behaviour; null: no correction
    filter: str = "differing_rewards"  # differing_rewards: at least two valid, differing rewards | none
    importance_level: str = "token"  # token | sequence: the ratio of which is truncated; sequence costs a forward pass
    importance_mask_below: float | None = None  # a smaller ratio takes its token or sequence out; null: none does
    importance_mask_above: float | None = None  # a larger one too; null: none does


@dataclass
class TrainerConfig:
    """What every trainer has; each adds its own (SCHEMAS)."""

    _target_: str = MISSING
    learning_rate: float = 5e-6  # constant after warm-up
    warmup_steps: int = 0  # linear from 0; 0: none
    betas: list[float] = field(default_factory=lambda: [0.9, 0.98])  # Adam
    eps: float = 1e-8  # Adam
    weight_decay: float = 0.1  # not on one-dimensional parameters
    max_grad_norm: float = 1.0  # 0: no clipping
    max_tokens_per_gpu: int = 1024  # tokens of one micro-batch; a longer sequence gets its own
    logprob_chunk_tokens: int = 256  # rows of [tokens, vocabulary] held at once


@dataclass
class TorchTrainerConfig(TrainerConfig):
    _target_: str = "rl360.trainers.torch_trainer.TorchTrainer"
    gradient_checkpointing: bool = False  # recompute each layer in the backward pass
    share_prompts: bool = True  # compute a prompt once for the members of its group
    device: str = "auto"  # auto | cpu | cuda
    num_threads: int = 0  # CPU threads of torch; 0: every core the process may use


@dataclass
class MegatronTrainerConfig(TrainerConfig):
    """Data parallelism takes what is left: num_gpus / (tensor x context x pipeline)."""

    _target_: str = "rl360.trainers.megatron.trainer.MegatronTrainer"
    max_tokens_per_gpu: int = 16384  # of one micro-batch on each of its context-parallel GPUs; a longer one: its own
    logprob_chunk_tokens: int = 1024  # rows of [tokens, vocabulary / tensor_parallel_size] held at once
    num_gpus: int = 1  # ranks, one a GPU
    tensor_parallel_size: int = 1  # GPUs that share each matrix
    pipeline_parallel_size: int = 1  # stages that share the layers
    virtual_pipeline_parallel_size: int | None = None  # chunks of layers a stage holds (interleaved); null: one
    context_parallel_size: int = 1  # GPUs that share each sequence
    sequence_parallel: bool = True  # tensor-parallel ranks share the tokens between matrices; no effect at size 1
    recompute: str = "none"  # none | core_attn | full: what the backward pass computes again rather than keeps
    transformer_engine: bool = False  # products, norms and attention of Transformer Engine, which must be installed
    compile: bool = True  # torch.compile what stands between matrices and attention; CUDA only
    overlap_grad_reduce: bool = False  # data and context ranks exchange gradients beside the backward pass
    async_checkpoint: bool = True  # the run goes on while a checkpoint is written
    step_timeout_s: float = 900.0  # one step of all ranks; below cluster.no_progress_s
    start_timeout_s: float = 900.0  # processes, NCCL and weights of all ranks; below cluster.no_progress_s
    init_method: str = "tcp://127.0.0.1:0"  # where the ranks meet; port 0: a free one
    rank_target: str = "rl360.trainers.megatron.rank:MegatronRank"  # class of one rank (tests: one for the CPU)


@dataclass
class SGLangConfig:
    """Servers that the run starts itself, with engine sglang. Null leaves a flag to SGLang."""

    command: list[str] = field(default_factory=list)  # what takes SGLang's flags; empty: this Python's sglang
    num_servers: int = 1
    tensor_parallel_size: int = 1  # GPUs of one server
    devices: list[int] = field(default_factory=list)  # of the visible GPUs, from 0, server by server; empty: all
    base_port: int = 0  # two ports a server from here on; 0: free ones
    dtype: str = "bfloat16"
    attention_backend: str | None = None  # such as triton, where the FA3 binary is missing
    sampling_backend: str | None = None  # such as pytorch
    grammar_backend: str | None = None  # none: no grammars, which RL360 does not use
    mem_fraction_static: float | None = None  # of a GPU's memory, for weights and KV cache
    max_running_requests: int | None = None
    cuda_graph_max_bs: int | None = None  # largest batch that decodes from a CUDA graph; 0: no graphs
    prefill_cuda_graph: bool = False  # capturing these took 75 s for a model of 135M
    colocated: bool = False  # servers and trainer share GPUs: each gives its memory to the other, in turns
    memory_saver: bool = False  # memory can be released and taken again; colocated turns it on
    external_model_package: str | None = None  # where SGLang finds models that it lacks
    extra_args: list[str] = field(default_factory=list)  # passed on as they are
    start_timeout_s: float = 900.0  # for a server to be ready
    health_interval_s: float = 5.0  # between two looks at a server
    health_timeout_s: float = 10.0  # for its scheduler to answer
    health_failures: int = 3  # looks in a row without an answer: it hangs, and is replaced
    straggler_s: float = 5.0  # of a sync's call: silent so much longer than the first to answer, it hangs
    max_restarts: int = 5  # of one server in the run; then it is given up
    bucket_gib: float = 1.0  # of weights sent at once, by ipc and nccl
    engines_per_group: int = 0  # servers in one broadcast group; 0: all of them, 1: none can hold up another
    compare_hashes: bool = True  # ask servers for hashes of their weights after each sync


@dataclass
class RolloutConfig:
    _target_: str = "rl360.rollout.queue.QueueRollout"
    engine: str = "embedded"  # embedded: in the trainer's process | sglang: servers of the run | external: engine_urls
    engine_urls: list[str] = field(default_factory=list)  # SGLang servers, when engine is external
    sglang: SGLangConfig = field(default_factory=SGLangConfig)
    sync: str = "shared"  # shared | disk | ipc | nccl: how new weights reach the engines
    sync_mode: str = "interrupt"  # interrupt: running requests resume under new weights | drain: they end first
    drain_timeout_s: float = 60.0  # drain waits at most so long, then interrupts
    temperature: float = 1.0
    top_p: float = 1.0  # below 1 is refused in training
    top_k: int = -1  # other than -1 is refused in training
    max_new_tokens: int = 256  # of one turn
    max_context_tokens: int = 2048  # prompt and all turns of an attempt
    stop: list[str] = field(default_factory=list)  # strings that end a turn
    stop_at_code_block: bool = False  # end the turn when a fenced code block closes
    max_staleness: int = 0  # versions that rollouts may run ahead; 0: on-policy
    concurrency: int = 64  # attempts open at once
    num_workers: int = 0  # trial worker processes; 0: two, more where cores and attempts warrant it
    start_interval_s: float = 0.02  # least time between two trial starts in one worker
    max_tries: int = 3  # tries of one attempt, the first included; then it is masked
    max_masked_share: float = 0.5  # more masked attempts than this share of an iteration end the run
    max_running_requests: int = 64  # rows that the embedded engine decodes at once
    kv_cache_gib: float = 1.0  # memory of the embedded engine's KV cache
    deterministic: bool = False  # one request at a time and groups in order: bit-equal reruns, slower
    request_timeout_s: float = 120.0  # one model call
    turn_timeout_s: float = 150.0  # one turn of an agent: the call and the tools
    keep_trial_dirs: bool = False  # keep Harbor's folder of each trial; failed ones are always kept


@dataclass
class GatewayConfig:
    """What every gateway has; each adds its own (SCHEMAS)."""

    _target_: str = MISSING
    host: str = "127.0.0.1"
    port: int = 0  # 0: a free one
    api_key_env: str | None = None  # name of the variable that holds the engines' key; null: none


@dataclass
class DirectGatewayConfig(GatewayConfig):
    _target_: str = "rl360.gateway.direct.DirectGateway"


@dataclass
class SmgGatewayConfig(GatewayConfig):
    _target_: str = "rl360.gateway.smg.SmgGateway"
    smg_port: int = 0  # where SMG listens; 0: a free one
    metrics_port: int = 0  # SMG's Prometheus metrics; 0: a free one (SMG's own 29000 is one for the whole machine)
    policy: str = "manual"  # manual: a new session goes to the least loaded engine | consistent_hashing: by its hash
    start_timeout_s: float = 60.0  # until SMG answers and has every engine
    stop_timeout_s: float = 10.0  # between SIGTERM and SIGKILL
    health_interval_s: float = 1.0  # between looks at SMG and the engines: how long a dead one is not noticed
    smg_args: list[str] = field(default_factory=list)  # more arguments of `smg launch`, after ours


@dataclass
class AgentConfig:
    import_path: str = "rl360.agents.single_turn:SingleTurnAgent"  # a Harbor agent, module:Class
    max_turns: int = 1  # model calls of one attempt; the session proxy refuses further ones
    timeout_s: float = 300.0  # the agent's own time, engine waits taken out
    kwargs: dict[str, Any] = field(default_factory=dict)  # passed to the agent's constructor


@dataclass
class RewardConfig:
    """One reward after the check. In YAML the constructor's arguments stand beside `_target_`, without `kwargs`."""

    _target_: str = MISSING
    kwargs: dict[str, Any] = field(default_factory=dict)  # passed to the reward's constructor


@dataclass
class SandboxConfig:
    import_path: str = "rl360.sandboxes.local:LocalSandbox"  # a Harbor environment, module:Class
    network: bool = False  # true: tasks that ask for the network get it; such a task is refused otherwise
    memory_mib: int = 1024  # 0: no limit
    cpus: float = 1.0  # 0: no limit
    pids: int = 256  # 0: no limit
    disk_mib: int = 512  # size of what a trial may write; 0: no limit
    start_timeout_s: float = 60.0
    verifier_timeout_s: float = 60.0
    lifetime_s: float = 900.0  # the sandbox ends itself after this
    base: str = "auto"  # root file system: auto | host (read-only view of /usr) | debootstrap | a folder
    unprivileged: bool = False  # true: user namespaces even when run as root
    kwargs: dict[str, Any] = field(default_factory=dict)  # passed to the environment's constructor


@dataclass
class TasksConfig:
    path: str = MISSING  # folder with harbor_records.jsonl and the task folders
    include: list[str] = field(default_factory=list)  # task ids to use; empty: all of the manifest
    exclude: list[str] = field(default_factory=list)  # task ids never trained on


@dataclass
class EvaluationConfig:
    every: int = 0  # iterations between evaluations; 0: never
    tasks: TasksConfig | None = None  # null: no evaluation
    k: int = 1  # attempts a task
    temperature: float = 1.0
    at_start: bool = False  # evaluate version 0 too


@dataclass
class LoggerConfig:
    """One logger after the check. In YAML the constructor's arguments stand beside `_target_`, without `kwargs`."""

    _target_: str = MISSING
    kwargs: dict[str, Any] = field(default_factory=dict)  # passed to the logger's constructor


@dataclass
class CheckpointConfig:
    every: int = 10  # iterations; 0: none between the first and the last
    at_end: bool = True  # after the last iteration; false: with `every` 0 an interrupted run leaves none either
    keep_last: int = 1  # complete checkpoints kept beside the best; at least 1
    keep_best: bool = True  # keep the checkpoint of the best evaluation
    keep_every: int = 0  # iterations; those of a multiple of it are kept for good; 0: none
    hf: bool = True  # write an HF folder beside the training state at the end


@dataclass
class MismatchConfig:
    """How far engine and trainer may be apart; see docs/guide/mismatch.md. Null: no such limit."""

    max_kl: float | None = 0.01  # of mismatch/kl, nats a token; above it a warning says where to look
    max_ratio: float | None = None  # of mismatch/ratio_max
    canary_growth: float = 1.5  # with trainer.learning_rate 0: how much the mean difference may grow over the run
    stop: bool = False  # true: an alarm ends the run; false: it warns


@dataclass
class ClusterConfig:
    _target_: str = "launchers.local.LocalLauncher"
    name: str = "local"
    client_timeout_s: float = 800.0  # the rollout gives up on a trial after this
    trial_timeout_s: float = 700.0  # one Harbor trial: sandbox, agent and verifier
    gpu_memory_gib: float | None = None  # of one GPU, for forecasts; null: of this machine's, or a usual card's
    no_progress_s: float = 1000.0  # the watchdog ends a run that has not moved for this long; above client_timeout_s


@dataclass
class PathsConfig:
    models: str = MISSING  # prepared models
    cache: str = MISSING  # sandbox layers and root file systems
    outputs: str = MISSING  # run folders


@dataclass
class RootConfig:
    name: str = "experiment"  # folder under paths.outputs, and the name in TensorBoard
    seed: int = 0
    iterations: int = 10
    group_size: int = 8  # attempts a task
    tasks_per_iteration: int = 4
    output_dir: str | None = None  # this run's folder; null: <paths.outputs>/<name>/<time>-<id>
    resume: str | None = None  # folder of an earlier run to continue
    allow_targets: list[str] = field(default_factory=list)  # module prefixes beside rl360. and launchers.
    model: ModelConfig = field(default_factory=ModelConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    trainer: TrainerConfig = field(default_factory=TorchTrainerConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    gateway: GatewayConfig = field(default_factory=DirectGatewayConfig)
    agent: AgentConfig = field(default_factory=AgentConfig)
    reward: dict[str, RewardConfig] = field(default_factory=dict)  # by name; lists would replace whole
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    tasks: TasksConfig = field(default_factory=TasksConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    logger: dict[str, LoggerConfig] = field(default_factory=dict)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    mismatch: MismatchConfig = field(default_factory=MismatchConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    paths: PathsConfig = field(default_factory=PathsConfig)


@dataclass
class ComposedConfig(RootConfig):
    """What Hydra composes and resolved.yaml holds: entries of the sets are flat, `reward.format_penalty.penalty: 0.3`.

    Their keys are checked against the constructor's signature, so that a reward of your own needs no schema.
    """

    trainer: Any = MISSING  # the chosen option's schema: SCHEMAS
    gateway: Any = MISSING
    reward: dict[str, Any] = field(default_factory=dict)
    logger: dict[str, Any] = field(default_factory=dict)


# Groups whose options have keys of their own: option -> schema. Which one checks a section, its `_target_` says; the
# first also stands for a target that is not ours. An option's YAML takes its defaults from
# `/schema_<group>_<option>@_here_`.
SCHEMAS: dict[str, dict[str, type[Any]]] = {
    "trainer": {"torch": TorchTrainerConfig, "megatron": MegatronTrainerConfig},
    "gateway": {"direct": DirectGatewayConfig, "smg": SmgGatewayConfig},
}


def schema_of(group: str, target: object) -> type[Any]:
    """The schema of a section by its `_target_`."""
    options = list(SCHEMAS[group].values())
    return next((schema for schema in options if schema._target_ == target), options[0])
