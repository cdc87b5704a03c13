"""`ClusterConfig`: the section of `tasks.config` about machines, and where more come from."""

from __future__ import annotations

from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, model_validator

_QUANTITY = r"^[1-9][0-9]*(\.[0-9]+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?$"
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_DNS_LABEL = r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"


class Section(BaseModel):
    """A section of a preset: frozen, and without fields that nobody reads."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class SlurmConfig(Section):
    """Workers as SLURM jobs. The checkout and its .venv lie on a file system that the nodes share;
    the store's credentials reach a job in its environment, as sbatch passes it by default."""

    partition: str | None = Field(None, min_length=1, description="Partition; empty: the default.")
    account: str | None = Field(None, min_length=1, description="Account the jobs are charged to.")
    memory: str = Field(
        pattern=r"^[1-9][0-9]*[KMGT]$", description="Memory of a job, as in --mem: 64G."
    )
    walltime: str = Field(
        pattern=r"^([0-9]+-)?[0-9]{1,2}:[0-9]{2}:[0-9]{2}$",
        description="Time limit of a job: 12:00:00. A worker that ends is made up for.",
    )
    rollout_directives: tuple[str, ...] = Field(
        (), description="Further #SBATCH lines of a rollout worker: --gres=gpu:1."
    )
    trainer_directives: tuple[str, ...] = Field(
        (), description="Further #SBATCH lines of a trainer worker."
    )
    prologue: tuple[str, ...] = Field(
        (), description="Shell lines before the worker starts: module load cuda."
    )
    interface: str | None = Field(
        None, min_length=1, description="Network interface that workers listen on: ib0."
    )


class KubernetesConfig(Section):
    """Workers as pods; the API server is that of the kubeconfig, or of the pod the flow runs in."""

    namespace: str = Field("default", pattern=_DNS_LABEL, description="Namespace of the pods.")
    image: str = Field(min_length=1, description="Image that has this project and its packages.")
    secret: str = Field(
        pattern=_DNS_LABEL,
        description="Secret whose keys become the pods' environment: AWS_ACCESS_KEY_ID and "
        "AWS_SECRET_ACCESS_KEY of the store.",
    )
    memory: str = Field(pattern=_QUANTITY, description="Memory of a pod: 64Gi.")
    rollout_gpus: int = Field(0, ge=0, le=16, description="GPUs of a rollout worker's pod.")
    trainer_gpus: int = Field(0, ge=0, le=1, description="GPUs of a trainer worker's pod.")


class ClusterConfig(Section):
    """The machines. Unset addresses mean: attach to `infra.local up`, or start an embedded one."""

    rollout_workers: int = Field(1, ge=1, le=4096, description="Workers that hold an engine.")
    rollout_workers_most: int | None = Field(
        None,
        ge=1,
        le=4096,
        description="Workers a run may grow to while work waits; empty: it does not grow.",
    )
    drain_s: float = Field(
        60.0, gt=0, description="A growing run adds workers to be done with its queue in this time."
    )
    idle_s: float = Field(
        120.0, gt=0, description="An added worker that had nothing to do for so long is given back."
    )
    trainer_ranks: int = Field(2, ge=1, le=4096, description="Ranks of the trainer group.")
    spare_trainers: int = Field(
        0,
        ge=0,
        le=4096,
        description="Further trainer workers that are warm: one takes the place of a rank that "
        "dies, while its own process starts anew.",
    )
    rollout_threads: int = Field(2, ge=1, description="CPU threads of a rollout worker.")
    trainer_threads: int = Field(1, ge=1, description="CPU threads of a trainer rank.")
    scheduler: str | None = Field(None, description="Address of a Dask scheduler that runs.")
    wait_s: float = Field(120.0, gt=0, description="Seconds to wait for the workers asked for.")
    store_endpoint: str | None = Field(
        None, description="URL of an S3 endpoint; its credentials come from the environment."
    )
    store_bucket: str = Field(
        "kindling", pattern=r"^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$", description="Bucket."
    )
    slurm: SlurmConfig | None = Field(
        None, description="Where the workers come from that the scheduler lacks: SLURM."
    )
    kubernetes: KubernetesConfig | None = Field(
        None, description="Where the workers come from that the scheduler lacks: Kubernetes."
    )

    @property
    def grows(self) -> bool:
        """Whether a run may take more rollout workers than it begins with."""
        return self.rollout_workers_most not in (None, self.rollout_workers)

    @property
    def trainers(self) -> int:
        """Trainer workers there are to be, spares included."""
        return self.trainer_ranks + self.spare_trainers

    @model_validator(mode="after")
    def _grows_upwards(self) -> ClusterConfig:
        most = self.rollout_workers_most
        if most is not None and most < self.rollout_workers:
            raise ValueError(
                f"rollout_workers_most is {most}, less than rollout_workers, which is "
                f"{self.rollout_workers}; raise the first or lower the second"
            )
        launched = self.slurm is not None or self.kubernetes is not None
        elsewhere = urlsplit(self.scheduler or "").hostname not in (None, *_LOOPBACK)
        if most is not None and elsewhere and not launched:
            raise ValueError(
                f"rollout_workers_most is {most} with scheduler {self.scheduler!r}: a run adds "
                "workers on its own machine, where that cluster would not find them; leave one "
                "out, or say in slurm or kubernetes where they are to come from"
            )
        return self

    @model_validator(mode="after")
    def _launched_workers_find_their_way(self) -> ClusterConfig:
        chosen = [name for name in ("slurm", "kubernetes") if getattr(self, name) is not None]
        if len(chosen) > 1:
            raise ValueError("slurm and kubernetes are both set; workers come from one: leave one")
        if chosen and (self.scheduler is None or self.store_endpoint is None):
            missing = "scheduler" if self.scheduler is None else "store_endpoint"
            raise ValueError(
                f"{chosen[0]} is set and {missing} is not: workers on other machines need the "
                "addresses of a Dask scheduler and of a store that they can reach; set both"
            )
        return self
