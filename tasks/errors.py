"""The one exception root.

Every error Kindling raises on purpose is a `KindlingError` and also the standard-library type a
caller would expect, so `except ValueError` and `except KindlingError` both work. All of them keep
their message as the only argument: they pickle across Dask workers unchanged.

A message says the value, what was expected and what to do about it.
"""


class KindlingError(Exception):
    """Root of all errors raised on purpose."""


class ConfigError(KindlingError, ValueError):
    """A preset, an override or a combination of them cannot work."""


class DataError(KindlingError, ValueError):
    """A dataset is unreadable, empty or laid out wrongly; names the row and the field."""


class PolicyError(KindlingError, ValueError):
    """A model folder, a tokenizer or a prompt does not fit what the run asks of it."""


class RetrieverError(KindlingError, OSError):
    """A retriever does not answer in time, or not as Search-R1's protocol says."""


class RetrieverUnreachable(RetrieverError, ConnectionError):
    """A retriever does not answer, whatever it is asked."""


class StoreError(KindlingError, OSError):
    """The object store does not answer, refuses the credentials or lacks an object."""


class StoreConflict(StoreError, FileExistsError):
    """A conditional write lost: the object exists, or the head moved since it was read."""


class IntegrityError(KindlingError, ValueError):
    """Bytes that do not match their digest, or a manifest that contradicts itself or its parent."""


class NotFiniteError(KindlingError, ArithmeticError):
    """A loss, a gradient or a weight is NaN or infinite; nothing was changed."""


class MismatchError(KindlingError, ArithmeticError):
    """Sampler and trainer disagree on the policy's log-probabilities; nothing was changed."""


class ClusterError(KindlingError, RuntimeError):
    """The scheduler is unreachable or lacks the workers the run needs."""


class SchedulerLost(ClusterError, ConnectionError):
    """The scheduler died under a run, and the run's queue with it: resume the run on a new one."""


class GangError(KindlingError, RuntimeError):
    """A trainer worker died, froze or failed, or serves another epoch by now: the stage is tried
    again on what is there."""


class WorkerBusy(GangError):
    """A trainer worker is still at work for an earlier gang and does not stop."""


class StageFailed(KindlingError, RuntimeError):
    """A trainer rank raised the same error when its stage was tried again: it always would."""


class RunClosed(KindlingError, RuntimeError):
    """The run was closed (finished, cancelled or its lease ran out): stop working for it."""


class UnitFailed(KindlingError, RuntimeError):
    """A rollout unit failed; the message names the unit, the worker and the cause."""


class RewardError(KindlingError, RuntimeError):
    """A reward function cannot be used, or failed; names the function, and the trajectory."""


class SeedFailed(KindlingError, RuntimeError):
    """A run of a sweep failed; the message names its seed, and where the others' results are."""


class ServiceError(KindlingError, RuntimeError):
    """A local service (store, scheduler, worker, Prefect server) did not start or died."""
